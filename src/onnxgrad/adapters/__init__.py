"""Low-rank adapters (LoRA, DoRA) beside the weights of a model, and adapter files.

`lora.py` chooses weights by patterns, `uses.py` finds the nodes that read them, `insertion.py`
writes an adapter beside each (`graph.py`). `merge.py` adds adapters to their weights,
also to quantized ones (`requantize.py`); `inputs.py` makes them inputs of one base. Files are in
`files.py`: of onnxruntime (`session_files.py`) and of PEFT (`peft_files.py`, `torch_modules.py`).
"""
