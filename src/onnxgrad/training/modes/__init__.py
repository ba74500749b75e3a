"""The form of a model that trains, and the form that predicts: BatchNormalization and Dropout."""
