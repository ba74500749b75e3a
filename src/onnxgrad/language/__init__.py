"""Language models as they are held: folders with tokenizers, texts, and generation."""
