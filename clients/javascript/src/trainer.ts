import type * as Ort from "onnxruntime-common";

import type { Artifacts, FileKind } from "./artifacts.js";
import { NotFiniteError, OnnxgradError, printedShape } from "./errors.js";
import { withInputs, withTensors } from "./onnx.js";
import { readSafetensors, writeSafetensors } from "./safetensors.js";
import { accepted, isFiniteEverywhere, scalar, type HostTensor, type InputSpec, type Symbols, type TensorSpec, type TypedArray, type Value } from "./tensors.js";

/** The module `onnxruntime-web` or `onnxruntime-node`. */
export type OrtModule = Pick<typeof Ort, "InferenceSession" | "Tensor">;
export type Batch = Readonly<Record<string, Value>>;

/** Where a state is kept: `browserStore(key)`, or `fileStore(path)` of "onnxgrad/node". */
export interface Store {
  /** Return what was written last, undefined if nothing was. */
  read(): Promise<Uint8Array | undefined>;
  write(bytes: Uint8Array): Promise<void>;
}

export interface TrainState {
  readonly step: number; // the number of steps that are done
  readonly weights: Readonly<Record<string, HostTensor>>;
  readonly slots: Readonly<Record<string, HostTensor>>;
  readonly buffers: Readonly<Record<string, HostTensor>>;
}

export interface Options {
  /** What sessions are made with, such as `{executionProviders: ["wasm"], intraOpNumThreads: 1}`. */
  readonly session?: Ort.InferenceSession.SessionOptions;
}

/**
 * Trains a model on this device.
 *
 * Calls may overlap: each waits for the one before. One that throws leaves the state as it was.
 *
 * @example
 * const trainer = await Trainer.create(ort, await loadArtifacts("artifacts/"));
 * const loss = await trainer.step({ image, label }, { learningRate: 1e-3 });
 */
export class Trainer {
  readonly #ort: OrtModule;
  readonly #artifacts: Artifacts;
  readonly #options: Options;
  readonly #sessions = new Map<FileKind, Promise<Ort.InferenceSession>>();
  #state: Map<string, HostTensor>;
  #steps: number;
  #turn: Promise<unknown> = Promise.resolve();
  #released = false;

  private constructor(ort: OrtModule, artifacts: Artifacts, options: Options) {
    this.#ort = ort;
    this.#artifacts = artifacts;
    this.#options = options;
    const { tensors, steps } = this.#fitting(artifacts.checkpoint);
    this.#state = tensors;
    this.#steps = steps;
  }

  /** Load the step and its first state: that of the artifacts' checkpoint. */
  static async create(ort: OrtModule, artifacts: Artifacts, options: Options = {}): Promise<Trainer> {
    const { weights, slots, scalars } = artifacts.manifest;
    for (const { name, dtype } of [...weights, ...slots, ...scalars.filter((s) => s.name === "minus_learning_rate")])
      if (!dtype.startsWith("float")) throw new OnnxgradError(`"${name}" is ${dtype}: clients train float32 and float64`);
    const trainer = new Trainer(ort, artifacts, options);
    await trainer.#session("step");
    return trainer;
  }

  get manifest(): Artifacts["manifest"] {
    return this.#artifacts.manifest;
  }

  /** The number of steps that are done. */
  get steps(): number {
    return this.#steps;
  }

  /** A copy of the weights, slots and buffers. */
  get state(): TrainState {
    const { weights, slots, buffers } = this.manifest;
    const copies = (specs: readonly TensorSpec[]) =>
      Object.fromEntries(
        specs.map(({ name }) => {
          const { dtype, shape, data } = this.#state.get(name)!;
          return [name, { dtype, shape: [...shape], data: data.slice() }];
        }),
      );
    return { step: this.#steps, weights: copies(weights), slots: copies(slots), buffers: copies(buffers) };
  }

  /**
   * Train on one batch; return its loss before the update.
   *
   * @throws NotFiniteError the loss or a new value is NaN or infinite
   */
  step(batch: Batch, { learningRate = this.manifest.learning_rate }: { learningRate?: number } = {}): Promise<number> {
    return this.#next(async () => {
      if (!(learningRate >= 0 && learningRate < Infinity))
        throw new OnnxgradError(`learningRate is ${learningRate}: pass a number >= 0`);
      const { inputs, scalars, loss } = this.manifest;
      const numbers: Record<string, number> = { minus_learning_rate: -learningRate, step: this.#steps + 1, draw: this.#steps };
      const feeds = new Map([...this.#state, ...checkedBatch(inputs, batch)]);
      for (const { name, dtype } of scalars) feeds.set(name, scalar(numbers[name]!, dtype));
      const fetches = [loss, ...[...this.#state.keys()].map((name) => `${name}.new`)];
      const results = await this.#run("step", feeds, fetches);
      const value = Number(results.get(loss)!.data[0]);
      const state = new Map([...this.#state.keys()].map((name) => [name, results.get(`${name}.new`)!]));
      const wrong = Number.isFinite(value) ? [...state].find(([, { data }]) => !isFiniteEverywhere(data))?.[0] : loss;
      if (wrong !== undefined)
        throw new NotFiniteError(`step ${this.#steps + 1}: ${wrong === loss ? `the loss is ${value}` : `"${wrong}" gets values that are NaN or infinite`}. The state is that before the step: check the batch for NaN, or lower the learning rate ${learningRate}`);
      this.#state = state;
      this.#steps += 1;
      return value;
    });
  }

  /** Return the loss of a batch, and the predictions, in inference form. */
  evaluate(batch: Batch): Promise<{ loss: number; outputs: Record<string, HostTensor> }> {
    return this.#next(async () => {
      const { inputs, loss, predictions } = this.manifest;
      const feeds = new Map([...this.#state, ...checkedBatch(inputs, batch)]);
      const results = await this.#run("eval", feeds, [...new Set([loss, ...predictions])]);
      const value = Number(results.get(loss)!.data[0]);
      results.delete(loss);
      return { loss: value, outputs: Object.fromEntries(results) };
    });
  }

  /** Return the outputs of the model with the current weights, by name. */
  predict(inputs: Batch): Promise<Record<string, HostTensor>> {
    return this.#next(async () => {
      const session = await this.#session("model");
      const specs = this.manifest.inputs.filter(({ name }) => session.inputNames.includes(name));
      const feeds = new Map([...this.#state, ...checkedBatch(specs, inputs)]);
      return Object.fromEntries(await this.#run("model", feeds, session.outputNames));
    });
  }

  /** Return the state as a safetensors file, such as `onnxgrad.merge_artifacts` reads in Python. */
  checkpoint(): Promise<Uint8Array> {
    return this.#next(async () => writeSafetensors({ tensors: this.#state, metadata: { ...this.#artifacts.checkpoint.metadata, step: String(this.#steps) } }));
  }

  /** Keep the state in a store. */
  async save(store: Store): Promise<void> {
    await store.write(await this.checkpoint());
  }

  /**
   * Go on from a state that was saved, by this package or by Python.
   *
   * @returns false if the store holds none
   */
  async restore(from: Store | Uint8Array): Promise<boolean> {
    const bytes = from instanceof Uint8Array ? from : await from.read();
    if (!bytes) return false;
    return this.#next(async () => {
      const { tensors, steps } = this.#fitting(readSafetensors(bytes));
      this.#state = tensors;
      this.#steps = steps;
      return true;
    });
  }

  /** Return the bytes of the inference model with the current weights: an ordinary .onnx file. */
  export(): Promise<Uint8Array> {
    return this.#next(async () => {
      const { model, found } = withTensors(await this.#artifacts.read("model"), this.#state);
      this.#requireWeights(found);
      return model;
    });
  }

  /** Free the memory of the sessions, after the calls that are running. */
  release(): Promise<void> {
    return this.#next(async () => {
      this.#released = true;
      for (const session of this.#sessions.values()) await (await session).release();
      this.#sessions.clear();
    });
  }

  /** Run `call` after the calls before it, also if they fail. */
  #next<T>(call: () => Promise<T>): Promise<T> {
    const result = this.#turn.then(() => {
      if (this.#released) throw new OnnxgradError("the trainer is released: create another");
      return call();
    });
    this.#turn = result.catch(() => undefined);
    return result;
  }

  #session(kind: FileKind): Promise<Ort.InferenceSession> {
    if (!this.#sessions.has(kind)) this.#sessions.set(kind, this.#load(kind));
    this.#sessions.get(kind)!.catch(() => this.#sessions.delete(kind)); // so that another try loads again
    return this.#sessions.get(kind)!;
  }

  async #load(kind: FileKind): Promise<Ort.InferenceSession> {
    let bytes = await this.#artifacts.read(kind);
    if (kind === "model") {
      const { model, found } = withInputs(bytes, this.#state);
      this.#requireWeights(found);
      bytes = model;
    }
    const session = await this.#ort.InferenceSession.create(bytes, { ...this.#options.session });
    const { inputs, weights, slots, buffers, scalars } = this.manifest;
    const known = new Set([...inputs, ...weights, ...slots, ...buffers, ...scalars].map(({ name }) => name));
    const other = session.inputNames.find((name) => !known.has(name));
    if (other !== undefined) throw new OnnxgradError(`${this.manifest.files[kind]} has an input "${other}" that the manifest lacks: write the artifacts again`);
    return session;
  }

  async #run(kind: FileKind, values: ReadonlyMap<string, HostTensor>, fetches: readonly string[]): Promise<Map<string, HostTensor>> {
    const session = await this.#session(kind);
    const lacks = fetches.find((name) => !session.outputNames.includes(name));
    if (lacks !== undefined) throw new OnnxgradError(`${this.manifest.files[kind]} has no output "${lacks}": write the artifacts again`);
    const feeds: Record<string, Ort.Tensor> = {};
    for (const name of session.inputNames) {
      const { dtype, shape, data } = values.get(name)!;
      feeds[name] = new this.#ort.Tensor(dtype as "float32", data as Float32Array, shape);
    }
    try {
      return hostTensors(await session.run(feeds, fetches));
    } finally {
      for (const tensor of Object.values(feeds)) tensor.dispose();
    }
  }

  /** Return the tensors of a checkpoint in the order of the manifest, and its number of steps. */
  #fitting({ tensors, metadata }: Artifacts["checkpoint"]): { tensors: Map<string, HostTensor>; steps: number } {
    const { weights, slots, buffers } = this.manifest;
    if ((metadata.model ?? this.manifest.digest) !== this.manifest.digest)
      throw new OnnxgradError("the checkpoint is of another model: pass one of these artifacts");
    const specs = [...weights, ...slots, ...buffers];
    const fitting = new Map<string, HostTensor>();
    for (const { name, dtype, shape } of specs) {
      const tensor = tensors.get(name);
      if (!tensor) throw new OnnxgradError(`the checkpoint has no "${name}": it is of another training, pass one of these artifacts`);
      if (tensor.dtype !== dtype || tensor.shape.length !== shape.length || shape.some((n, i) => typeof n === "number" && n !== tensor.shape[i]))
        throw new OnnxgradError(`"${name}" is ${tensor.dtype} ${printedShape(tensor.shape)} in the checkpoint, but ${dtype} ${printedShape(shape)} in the artifacts: it is of another training`);
      fitting.set(name, tensor);
    }
    const other = [...tensors.keys()].find((name) => !fitting.has(name));
    if (other !== undefined) throw new OnnxgradError(`the checkpoint holds "${other}", which these artifacts lack: it is of another training`);
    const steps = Number(metadata.step ?? 0);
    if (!Number.isSafeInteger(steps) || steps < 0) throw new OnnxgradError(`the checkpoint says step=${metadata.step}, which is no number of steps`);
    return { tensors: fitting, steps };
  }

  /** Throw if the model lacks weights; buffers that are no constants of the file are not exported. */
  #requireWeights(found: ReadonlySet<string>): void {
    const hidden = this.manifest.weights.find(({ name }) => !found.has(name));
    if (hidden) throw new OnnxgradError(`the weight "${hidden.name}" is no initializer or Constant of the main graph of ${this.manifest.files.model}: save the state, and merge it by \`onnxgrad merge\``);
  }
}

/** Return the tensors of a batch by the names of inputs, or throw. */
function checkedBatch(specs: readonly InputSpec[], batch: Batch): Map<string, HostTensor> {
  const names = specs.map(({ name }) => `"${name}"`).join(", ");
  for (const name of Object.keys(batch))
    if (!specs.some((spec) => spec.name === name)) throw new OnnxgradError(`there is no input "${name}": the inputs are ${names}`);
  const symbols: Symbols = new Map();
  return new Map(
    specs.map((spec) => {
      const value = batch[spec.name];
      if (value === undefined) throw new OnnxgradError(`the input "${spec.name}" is missing: pass ${spec.dtype} ${printedShape(spec.shape)}`);
      return [spec.name, accepted(spec, value, symbols)];
    }),
  );
}

/** Take the arrays of what a session returned, and free the tensors. */
function hostTensors(results: Ort.InferenceSession.OnnxValueMapType): Map<string, HostTensor> {
  const host = new Map<string, HostTensor>();
  for (const [name, value] of Object.entries(results)) {
    const { type, dims, data } = value as Ort.Tensor;
    if (type === "string" || !ArrayBuffer.isView(data)) throw new OnnxgradError(`the output "${name}" is ${type}, which clients do not hold`);
    host.set(name, { dtype: type as HostTensor["dtype"], shape: [...dims], data: data as TypedArray });
    (value as Ort.Tensor).dispose();
  }
  return host;
}
