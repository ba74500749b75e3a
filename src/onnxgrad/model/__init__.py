"""Models as `ModelProto`: reading, validating, rewriting and writing them."""
