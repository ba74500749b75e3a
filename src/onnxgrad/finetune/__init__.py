"""New heads, backbones, adapters and preprocessing for models that are fine-tuned."""
