"""Running steps: in one session, in place, for the members of a stack, by several processes."""
