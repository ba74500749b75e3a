"""From any model to the primal, in which rules stay few and short."""
