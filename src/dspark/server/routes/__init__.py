"""The server's endpoints, one file a group."""
