# syntax=docker/dockerfile:1
# The server in a container, for a CPU or for NVIDIA GPUs:
#
#   docker build --target cpu -t dspark:cpu .
#   docker build --target cuda -t dspark:cuda .
#   docker run --rm -p 127.0.0.1:8000:8000 -v dspark-models:/models dspark:cpu
#   docker run --rm --gpus all -e DSPARK_API_KEY -p 8000:8000 -v dspark-models:/models dspark:cuda serve MODEL --host 0.0.0.0

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS base
ENV DSPARK_HOME=/models HF_HOME=/models/huggingface PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 dspark && install -d -o dspark -g dspark /models
COPY constraints.txt /tmp/constraints.txt
EXPOSE 8000
# Inside the container the server must listen on every interface: what of it can be reached is decided by -p.
ENTRYPOINT ["dspark"]
CMD ["serve", "smollm2-135m", "--host", "0.0.0.0"]
HEALTHCHECK --interval=10s --timeout=3s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]

# PyPI's PyTorch for Linux brings the CUDA libraries along, so the driver of the host is all that is missing. Triton
# compiles its launchers with the system's C compiler.
FROM base AS cuda
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    wheel=$(ls /wheels/*.whl) && pip install --no-cache-dir -c /tmp/constraints.txt "${wheel}[grammar]"
VOLUME /models
USER dspark

FROM base AS cpu
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    wheel=$(ls /wheels/*.whl) && pip install --no-cache-dir -c /tmp/constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu "${wheel}[grammar]"
VOLUME /models
USER dspark
