export { loadArtifacts, type Artifacts, type FileKind, type Files, type Manifest } from "./artifacts.js";
export { NotFiniteError, OnnxgradError } from "./errors.js";
export { readSafetensors, writeSafetensors, type TensorFile } from "./safetensors.js";
export { browserStore } from "./stores.js";
export type { Dtype, HostTensor, InputSpec, TensorSpec, TypedArray, Value } from "./tensors.js";
export { Trainer, type Batch, type Options, type OrtModule, type Store, type TrainState } from "./trainer.js";
