"""Models as files and as `ModelProto`."""
