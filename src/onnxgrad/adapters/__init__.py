"""Low-rank adapters beside the weights of a model, and their files."""
