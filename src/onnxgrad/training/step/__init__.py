"""The step: from a batch, weights and slots to the loss, new weights and new slots."""
