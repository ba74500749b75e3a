"""New heads, backbones and preprocessing for models that are fine-tuned."""
