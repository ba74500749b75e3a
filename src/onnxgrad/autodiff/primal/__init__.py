"""Preparation: any model -> the primal, in the working dialect."""
