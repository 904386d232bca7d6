"""`python -m dspark`, and `torchrun -m dspark` for many processes: the command line."""

from dspark.cli import main

if __name__ == "__main__":
    main()
