"""The record that a callback writes during a training, and the page that shows it.

`recorder.py` is the callback that writes a record, with `predictions.py` and `environment.py`;
`run.py` reads it, `sections.py` and `figures.py` prepare its parts, `page.py` fills the template.
`card.py` writes a model card.
"""
