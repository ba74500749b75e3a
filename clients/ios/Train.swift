// Train a model by the files of og.artifacts.generate_artifacts, and save the state.
//
// `data` is a .safetensors file with a tensor for each input of a batch; the rows are along the
// first axis. `saved` is a .safetensors file: training goes on from it if it exists, and it is
// replaced. Call `train` on a queue in the background, never on the main thread.
import Foundation
#if canImport(OnnxRuntimeBindings)
import OnnxRuntimeBindings  // the Swift package
#else
import onnxruntime_objc  // the pod
#endif

let usualRows = 32  // rows of a batch, unless the model fixes their number

struct TrainingError: Error {
    let message: String
}

typealias JSONObject = [String: Any]

func train(artifacts: URL, data: URL, saved: URL, steps: Int) throws -> Double {
    let manifestFile = artifacts.appendingPathComponent("training.json")
    let manifest = try jsonObject(Data(contentsOf: manifestFile))
    let files = try field(manifest, "files", as: [String: String].self)
    let batchInputs = try field(manifest, "inputs", as: [JSONObject].self)
    let scalars = try field(manifest, "scalars", as: [JSONObject].self)
    let lossName = try field(manifest, "loss", as: String.self)
    let rate = try field(manifest, "learning_rate", as: Double.self)  // a schedule is yours
    let fixedRows = batchInputs.compactMap { ($0["shape"] as? [Any])?.first as? Int }
    let rows = fixedRows.first ?? usualRows

    func url(of key: String) throws -> URL {
        return artifacts.appendingPathComponent(try field(files, key, as: String.self))
    }
    let columns = try SafetensorsFile(contentsOf: data).arrays
    let exists = FileManager.default.fileExists(atPath: saved.path)
    var file = try SafetensorsFile(contentsOf: exists ? saved : url(of: "checkpoint"))
    let first = Int(file.metadata["step"] ?? "0") ?? 0

    // The state of the training: weights, slots of the optimizer, buffers. Each has an input, and
    // an output `.new`.
    let names = try ["weights", "slots", "buffers"]
        .flatMap { try field(manifest, $0, as: [JSONObject].self) }
        .map { try field($0, "name", as: String.self) }
    let outputs = Set(names.map { "\($0).new" } + [lossName])
    let environment = try ORTEnv(loggingLevel: ORTLoggingLevel.warning)
    let session = try ORTSession(
        env: environment, modelPath: url(of: "step").path, sessionOptions: nil)
    var state: [String: ORTValue] = [:]
    for name in names {
        state[name] = try field(file.arrays, name, as: StoredArray.self).value()
    }
    var loss = Double.nan

    for step in first..<(first + steps) {
        try autoreleasepool {
            var inputs = state
            for entry in batchInputs {
                let name = try field(entry, "name", as: String.self)
                let column = try field(columns, name, as: StoredArray.self)
                inputs[name] = try column.takeRows(from: step * rows, count: rows).value()
            }
            for entry in scalars {
                let name = try field(entry, "name", as: String.self)
                inputs[name] = try scalar(entry, step: step, rate: rate).value()
            }
            let results = try session.run(
                withInputs: inputs, outputNames: outputs, runOptions: nil)
            let number = try field(results, lossName, as: ORTValue.self).tensorData()
            // 4 bytes: float32. onnxruntime-objc has no float64
            loss = Double(number.bytes.load(as: Float.self))
            guard loss.isFinite else {
                throw TrainingError(message: "the loss of step \(step + 1) is \(loss)")
            }
            for name in names {
                state[name] = try field(results, "\(name).new", as: ORTValue.self)
            }
        }
    }
    for name in names {
        let raw = try field(state, name, as: ORTValue.self).tensorData()  // memory of onnxruntime
        file.arrays[name]?.bytes = Data(bytes: raw.bytes, count: raw.length)
    }
    file.metadata["step"] = String(first + steps)
    try file.write(to: saved)
    return loss
}

/// A scalar of a step, in the dtype that the manifest states.
func scalar(_ entry: JSONObject, step: Int, rate: Double) throws -> StoredArray {
    func bytes<T>(_ number: T) -> Data {
        return withUnsafeBytes(of: number) { Data($0) }
    }
    switch try field(entry, "name", as: String.self) {
    case "step":  // 1 in the first step
        return StoredArray(dtype: "I64", shape: [], bytes: bytes(Int64(step + 1)))
    case "draw":  // decides the masks of dropout
        return StoredArray(dtype: "I64", shape: [], bytes: bytes(Int64(step)))
    case "minus_learning_rate":
        return StoredArray(dtype: "F32", shape: [], bytes: bytes(Float(-rate)))
    case let name:
        throw TrainingError(message: "unknown scalar \(name)")
    }
}

/// An array of a .safetensors file: its dtype as in the file ("F32"), and its little-endian bytes.
struct StoredArray {
    var dtype: String
    var shape: [Int]
    var bytes: Data

    /// Rows from a row on, beginning again at row 0 after the last one.
    func takeRows(from begin: Int, count: Int) -> StoredArray {
        let width = bytes.count / shape[0]
        var taken = Data(capacity: count * width)
        for row in begin..<(begin + count) {
            let at = bytes.startIndex + row % shape[0] * width
            taken.append(bytes[at..<(at + width)])
        }
        return StoredArray(dtype: dtype, shape: [count] + shape.dropFirst(), bytes: taken)
    }

    func value() throws -> ORTValue {
        let types: [String: ORTTensorElementDataType] = [
            "F32": .float, "I64": .int64, "I32": .int32, "I8": .int8, "U8": .uInt8,
        ]
        guard let type = types[dtype] else {
            throw TrainingError(message: "onnxruntime-objc has no tensors of dtype \(dtype)")
        }
        return try ORTValue(
            tensorData: NSMutableData(data: bytes), elementType: type,
            shape: shape.map { NSNumber(value: $0) })
    }
}

/// 8 bytes, the length of a header in JSON; the header; the elements.
struct SafetensorsFile {
    var arrays: [String: StoredArray] = [:]
    var metadata: [String: String] = [:]

    init(contentsOf url: URL) throws {
        let content = try Data(contentsOf: url)
        let length = content.prefix(8).reversed().reduce(0) { $0 << 8 | Int($1) }
        let begin = 8 + length
        for (name, value) in try jsonObject(content.subdata(in: 8..<begin)) {
            if name == "__metadata__" {
                metadata = value as? [String: String] ?? [:]
                continue
            }
            let entry = value as? JSONObject ?? [:]
            let offsets = try field(entry, "data_offsets", as: [Int].self)
            arrays[name] = StoredArray(
                dtype: try field(entry, "dtype", as: String.self),
                shape: try field(entry, "shape", as: [Int].self),
                bytes: content.subdata(in: (begin + offsets[0])..<(begin + offsets[1])))
        }
    }

    /// Write a file, which replaces an older one only when it is complete.
    func write(to url: URL) throws {
        var header: JSONObject = ["__metadata__": metadata]
        var elements = Data()
        for (name, array) in arrays {
            let begin = elements.count
            elements.append(array.bytes)
            header[name] = [
                "dtype": array.dtype, "shape": array.shape, "data_offsets": [begin, elements.count],
            ] as JSONObject
        }
        var text = try JSONSerialization.data(withJSONObject: header)
        text.append(Data(repeating: UInt8(ascii: " "), count: (8 - text.count % 8) % 8))
        var content = withUnsafeBytes(of: UInt64(text.count).littleEndian) { Data($0) }
        content.append(text)
        content.append(elements)
        try content.write(to: url, options: .atomic)
    }
}

func jsonObject(_ data: Data) throws -> JSONObject {
    guard let object = try JSONSerialization.jsonObject(with: data) as? JSONObject else {
        throw TrainingError(message: "the file holds no JSON object")
    }
    return object
}

/// The value of a key, or an error that names the key.
func field<T>(_ object: [String: Any], _ key: String, as type: T.Type) throws -> T {
    guard let value = object[key] as? T else {
        throw TrainingError(message: "\(key) is missing, or is no \(type)")
    }
    return value
}
