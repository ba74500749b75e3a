"""Running steps: in one session, in place, in parts that threads or processes share."""
