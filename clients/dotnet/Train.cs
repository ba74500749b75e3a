// Train a model by the files of og.artifacts.generate_artifacts, and save the state:
//
//     Train ARTIFACTS DATA STATE STEPS
//
// DATA is a .safetensors file with a tensor for each input of a batch; the rows are along the first
// axis. STATE is a .safetensors file: training goes on from it if it exists, and it is replaced.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text.Json;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

static class Train
{
    const int Rows = 32; // rows of a batch, unless the model fixes their number

    static void Main(string[] arguments)
    {
        Run(arguments[0], arguments[1], arguments[2], int.Parse(arguments[3]));
    }

    public static void Run(string artifacts, string dataPath, string statePath, int steps)
    {
        var manifestText = File.ReadAllText(Path.Combine(artifacts, "training.json"));
        using (var document = JsonDocument.Parse(manifestText))
        {
            var manifest = document.RootElement;
            Func<string, string> pathOf = key =>
                Path.Combine(artifacts, manifest.GetProperty("files").GetProperty(key).GetString());
            var columns = SafetensorsFile.Read(dataPath).Arrays;
            var saved = File.Exists(statePath) ? statePath : pathOf("checkpoint");
            var file = SafetensorsFile.Read(saved);
            using (var session = new InferenceSession(pathOf("step")))
            {
                TrainSteps(manifest, session, columns, file, steps);
            }
            file.Write(statePath);
        }
    }

    // Runs the steps, and puts the state after the last one into `file`.
    static void TrainSteps(JsonElement manifest, InferenceSession session,
                           Dictionary<string, StoredArray> columns, SafetensorsFile file, int steps)
    {
        // The state of the training: weights, slots of the optimizer, buffers. Each has an input,
        // and an output `.new`.
        var names = new[] { "weights", "slots", "buffers" }
            .SelectMany(key => manifest.GetProperty(key).EnumerateArray()).Select(NameOf).ToList();
        var batchInputs = manifest.GetProperty("inputs").EnumerateArray().ToList();
        var scalars = manifest.GetProperty("scalars").EnumerateArray().ToList();
        var lossName = manifest.GetProperty("loss").GetString();
        var outputs = names.Select(name => name + ".new").Prepend(lossName).ToList();
        var rate = manifest.GetProperty("learning_rate").GetDouble(); // a schedule is yours
        var fixedRows = batchInputs.Select(input => input.GetProperty("shape")[0])
            .Where(length => length.ValueKind == JsonValueKind.Number).ToList();
        var rows = fixedRows.Count > 0 ? fixedRows[0].GetInt32() : Rows;
        string done;
        var first = file.Metadata.TryGetValue("step", out done) ? long.Parse(done) : 0;

        var state = names.ToDictionary(name => name, name => file.Arrays[name].ToOrtValue());
        try
        {
            using (var options = new RunOptions())
            {
                for (var step = first; step < first + steps; step++)
                {
                    var batch = batchInputs.ToDictionary(NameOf, input =>
                        columns[NameOf(input)].TakeRows(step * rows, rows).ToOrtValue());
                    foreach (var entry in scalars) batch[NameOf(entry)] = Scalar(entry, step, rate);
                    var inputs = new Dictionary<string, OrtValue>(state);
                    foreach (var pair in batch) inputs[pair.Key] = pair.Value;
                    var results = session.Run(options, inputs, outputs);
                    foreach (var value in inputs.Values) value.Dispose();
                    state = names.Select((name, i) => (name, results[i + 1]))
                        .ToDictionary(pair => pair.Item1, pair => pair.Item2);
                    using (var value = results[0])
                    {
                        var type = value.GetTensorTypeAndShape().ElementDataType;
                        var loss = type == TensorElementType.Double
                            ? value.GetTensorDataAsSpan<double>()[0]
                            : value.GetTensorDataAsSpan<float>()[0];
                        if (double.IsNaN(loss) || double.IsInfinity(loss))
                            throw new InvalidOperationException(
                                $"the loss of step {step + 1} is {loss}");
                        Console.WriteLine($"{step + 1} {loss}");
                    }
                }
            }
            foreach (var name in names)
                file.Arrays[name].Bytes = state[name].GetTensorMutableRawData().ToArray();
            file.Metadata["step"] = $"{first + steps}";
        }
        finally
        {
            foreach (var value in state.Values) value.Dispose();
        }
    }

    static string NameOf(JsonElement entry) => entry.GetProperty("name").GetString();

    // A scalar of a step, in the dtype that the manifest states.
    static OrtValue Scalar(JsonElement entry, long step, double rate)
    {
        var shape = new long[0];
        switch (NameOf(entry))
        {
            case "step": // 1 in the first step
                return OrtValue.CreateTensorValueFromMemory(new[] { step + 1 }, shape);
            case "draw": // decides the masks of dropout
                return OrtValue.CreateTensorValueFromMemory(new[] { step }, shape);
            case "minus_learning_rate":
                return entry.GetProperty("dtype").GetString() == "float64"
                    ? OrtValue.CreateTensorValueFromMemory(new[] { -rate }, shape)
                    : OrtValue.CreateTensorValueFromMemory(new[] { (float)-rate }, shape);
            default:
                throw new NotSupportedException($"unknown scalar {NameOf(entry)}");
        }
    }
}

// An array of a .safetensors file: its dtype as in the file ("F32"), and its little-endian bytes.
class StoredArray
{
    public string Dtype;
    public long[] Shape;
    public byte[] Bytes;

    static readonly Dictionary<string, TensorElementType> Types =
        new Dictionary<string, TensorElementType>
        {
            ["F32"] = TensorElementType.Float, ["F64"] = TensorElementType.Double,
            ["I64"] = TensorElementType.Int64, ["I32"] = TensorElementType.Int32,
            ["I16"] = TensorElementType.Int16, ["I8"] = TensorElementType.Int8,
            ["U8"] = TensorElementType.UInt8, ["BOOL"] = TensorElementType.Bool,
        };

    public OrtValue ToOrtValue()
    {
        var value = OrtValue.CreateAllocatedTensorValue(
            OrtAllocator.DefaultInstance, Types[Dtype], Shape);
        Bytes.AsSpan().CopyTo(value.GetTensorMutableRawData());
        return value;
    }

    // Rows from `begin` on, beginning again at row 0 after the last one.
    public StoredArray TakeRows(long begin, int rows)
    {
        var width = (int)(Bytes.Length / Shape[0]);
        var taken = new byte[rows * width];
        for (var row = 0; row < rows; row++)
        {
            var from = (int)((begin + row) % Shape[0]) * width;
            Buffer.BlockCopy(Bytes, from, taken, row * width, width);
        }
        var shape = (long[])Shape.Clone();
        shape[0] = rows;
        return new StoredArray { Dtype = Dtype, Shape = shape, Bytes = taken };
    }
}

// 8 bytes, the length of a header in JSON; the header; the elements.
class SafetensorsFile
{
    public Dictionary<string, StoredArray> Arrays = new Dictionary<string, StoredArray>();
    public Dictionary<string, string> Metadata = new Dictionary<string, string>();

    public static SafetensorsFile Read(string path)
    {
        var content = File.ReadAllBytes(path);
        var begin = 8 + (int)BitConverter.ToInt64(content, 0);
        var file = new SafetensorsFile();
        using (var header = JsonDocument.Parse(content.AsMemory(8, begin - 8)))
        {
            foreach (var entry in header.RootElement.EnumerateObject())
            {
                if (entry.Name == "__metadata__")
                {
                    foreach (var pair in entry.Value.EnumerateObject())
                        file.Metadata[pair.Name] = pair.Value.GetString();
                    continue;
                }
                var offsets = entry.Value.GetProperty("data_offsets");
                var from = offsets[0].GetInt32();
                file.Arrays[entry.Name] = new StoredArray
                {
                    Dtype = entry.Value.GetProperty("dtype").GetString(),
                    Shape = entry.Value.GetProperty("shape").EnumerateArray()
                        .Select(length => length.GetInt64()).ToArray(),
                    Bytes = content.AsSpan(begin + from, offsets[1].GetInt32() - from).ToArray(),
                };
            }
        }
        return file;
    }

    // The file replaces an older one only when it is complete.
    public void Write(string path)
    {
        var header = new Dictionary<string, object> { ["__metadata__"] = Metadata };
        var end = 0;
        foreach (var pair in Arrays)
        {
            var begin = end;
            end += pair.Value.Bytes.Length;
            header[pair.Key] = new Dictionary<string, object>
            {
                ["dtype"] = pair.Value.Dtype,
                ["shape"] = pair.Value.Shape,
                ["data_offsets"] = new[] { begin, end },
            };
        }
        var text = JsonSerializer.SerializeToUtf8Bytes(header);
        var padding = (8 - text.Length % 8) % 8;
        var partial = path + ".partial";
        using (var writer = new BinaryWriter(File.Create(partial)))
        {
            writer.Write((long)(text.Length + padding));
            writer.Write(text);
            for (var i = 0; i < padding; i++) writer.Write((byte)' ');
            foreach (var array in Arrays.Values) writer.Write(array.Bytes);
        }
        if (File.Exists(path)) File.Replace(partial, path, null);
        else File.Move(partial, path);
    }
}
