/** The files that `onnxgrad.generate_artifacts` writes. */
import { OnnxgradError } from "./errors.js";
import { readSafetensors, type TensorFile } from "./safetensors.js";
import { isDtype, type InputSpec, type TensorSpec } from "./tensors.js";

export interface Manifest {
  readonly format: 1;
  readonly inputs: readonly (InputSpec & { readonly role: "data" | "label" | "weight_of_rows" })[];
  readonly weights: readonly TensorSpec[];
  readonly slots: readonly (TensorSpec & { readonly weight: string })[];
  readonly buffers: readonly TensorSpec[];
  readonly scalars: readonly TensorSpec[];
  readonly learning_rate: number;
  readonly loss: string;
  readonly predictions: readonly string[];
  readonly files: Readonly<Partial<Record<FileKind, string>>>;
  /** Identifies the model that is trained. */
  readonly digest: string;
}

export type FileKind = "step" | "eval" | "training" | "optimizer" | "checkpoint" | "model";

/** The bytes of the files by name; or what returns those of one, and throws if there is none. */
export type Files = Readonly<Record<string, Uint8Array | ArrayBuffer>> | ((name: string) => Promise<Uint8Array>);

export interface Artifacts {
  readonly manifest: Manifest;
  readonly checkpoint: TensorFile;
  /** Return the bytes of a file, which is read when it is first asked for. */
  read(kind: FileKind): Promise<Uint8Array>;
}

const SCALARS = ["minus_learning_rate", "step", "draw"];

/**
 * Load artifacts from the address of their folder, or from their files.
 *
 * The manifest and the checkpoint are read at once, the models when they are first used.
 *
 * @param prefix the prefix that `generate_artifacts` was given
 */
export async function loadArtifacts(source: string | URL | Files, { prefix = "" } = {}): Promise<Artifacts> {
  const read = reader(source);
  const manifest = checked(await read(`${prefix}training.json`));
  const kept = new Map<FileKind, Promise<Uint8Array>>();
  const file = (kind: FileKind): Promise<Uint8Array> => {
    const name = manifest.files[kind];
    if (!name) return Promise.reject(new OnnxgradError(`the manifest names no file "${kind}": write the artifacts again${kind === "step" ? ", with an optimizer" : ""}`));
    if (!kept.has(kind)) kept.set(kind, read(name));
    kept.get(kind)!.catch(() => kept.delete(kind)); // so that another try reads again
    return kept.get(kind)!;
  };
  return { manifest, checkpoint: readSafetensors(await file("checkpoint")), read: file };
}

function reader(source: string | URL | Files): (name: string) => Promise<Uint8Array> {
  if (typeof source === "function") return source;
  if (typeof source === "string" || source instanceof URL) return (name) => fetched(source, name);
  return async (name) => {
    const bytes = source[name];
    if (!bytes) throw new OnnxgradError(`there is no file "${name}" among ${JSON.stringify(Object.keys(source))}: pass all files of the artifacts`);
    return bytes instanceof Uint8Array ? bytes : new Uint8Array(bytes);
  };
}

async function fetched(folder: string | URL, name: string): Promise<Uint8Array> {
  const here = typeof document === "undefined" ? undefined : document.baseURI;
  if (!here && !/^[a-z]+:\/\//i.test(String(folder)))
    throw new OnnxgradError(`"${folder}" is no address: in Node, pass readFolder(path) of "onnxgrad/node"`);
  const base = new URL(folder, here);
  if (!base.pathname.endsWith("/")) base.pathname += "/";
  const address = new URL(encodeURIComponent(name), base);
  address.search = base.search;
  const response = await fetch(address);
  if (!response.ok) throw new OnnxgradError(`${address} answers ${response.status} ${response.statusText}: pass the address of the folder of the artifacts`);
  return new Uint8Array(await response.arrayBuffer());
}

function checked(bytes: Uint8Array): Manifest {
  let manifest: Manifest;
  try {
    manifest = JSON.parse(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new OnnxgradError(`training.json is not JSON (${(error as Error).message}): pass the folder that generate_artifacts wrote`);
  }
  if (manifest.format !== 1)
    throw new OnnxgradError(`training.json has the format ${manifest.format}, this package reads 1: install the version of onnxgrad that wrote it`);
  const states = [...manifest.weights, ...manifest.slots, ...manifest.buffers];
  for (const { name, dtype } of [...manifest.inputs, ...states, ...manifest.scalars])
    if (!isDtype(dtype)) throw new OnnxgradError(`"${name}" has the dtype ${dtype}, which clients in JavaScript do not hold: train the model in float32`);
  for (const { name } of manifest.scalars)
    if (!SCALARS.includes(name)) throw new OnnxgradError(`the step reads the scalar "${name}", which this package does not know: install the version of onnxgrad that wrote it`);
  return manifest;
}
