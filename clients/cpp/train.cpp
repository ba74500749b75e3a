// Train a model on a device by the files of og.artifacts.generate_artifacts, and save its state:
//
//     train ARTIFACTS DATA STATE STEPS
//
// DATA is a .safetensors file with a tensor for each input of a batch; the rows are along the first
// axis. STATE is a .safetensors file: training goes on from it if it exists, and it is replaced.
// The machine is little-endian, as the files are.
#include <nlohmann/json.hpp>
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

using json = nlohmann::json;
namespace fs = std::filesystem;

constexpr int64_t kRows = 32;  // rows of a batch, unless the model fixes their number

struct Array {
  std::string dtype;  // as in the .safetensors file: "F32"
  std::vector<int64_t> shape;
  std::vector<char> bytes;
};

struct File {
  std::map<std::string, Array> arrays;
  json metadata = json::object();  // of strings
};

// The array of a name, or an error that says the name.
Array& named(File& file, const std::string& name) {
  const auto found = file.arrays.find(name);
  if (found == file.arrays.end()) throw std::runtime_error("a file has no tensor " + name);
  return found->second;
}

// A .safetensors file: 8 bytes, the length of a header in JSON; the header; the elements.
File read_safetensors(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  in.exceptions(std::ios::failbit | std::ios::badbit);
  uint64_t length = 0;
  in.read(reinterpret_cast<char*>(&length), sizeof length);
  std::string text(length, ' ');
  in.read(text.data(), length);
  const json header = json::parse(text);
  File file;
  for (auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      file.metadata = entry;
      continue;
    }
    const auto offsets = entry["data_offsets"].get<std::vector<uint64_t>>();
    Array array{entry["dtype"], entry["shape"], std::vector<char>(offsets[1] - offsets[0])};
    in.seekg(8 + length + offsets[0]);
    in.read(array.bytes.data(), array.bytes.size());
    file.arrays[name] = std::move(array);
  }
  return file;
}

// The file replaces an older one only when it is complete.
void write_safetensors(const fs::path& path, const File& file) {
  json header{{"__metadata__", file.metadata}};
  uint64_t end = 0;
  for (auto& [name, array] : file.arrays) {
    const uint64_t begin = end;
    end += array.bytes.size();
    header[name] = {{"dtype", array.dtype}, {"shape", array.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  const fs::path partial = path.string() + ".partial";
  {
    std::ofstream out(partial, std::ios::binary);
    out.exceptions(std::ios::failbit | std::ios::badbit);
    out.write(reinterpret_cast<const char*>(&length), sizeof length);
    out << text;
    for (auto& [name, array] : file.arrays) out.write(array.bytes.data(), array.bytes.size());
  }
  fs::rename(partial, path);
}

// A tensor of these elements, which are not copied: `bytes` must live as long as the tensor.
Ort::Value tensor(const std::string& dtype, const std::vector<int64_t>& shape, char* bytes,
                  size_t size) {
  static const std::map<std::string, ONNXTensorElementDataType> types{
      {"F32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, {"F64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
      {"I64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}, {"I32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"I16", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16}, {"I8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
      {"U8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},  {"BOOL", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL},
  };
  static const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  return Ort::Value::CreateTensor(memory, bytes, size, shape.data(), shape.size(),
                                  types.at(dtype));
}

// Rows `begin` to `begin + rows` of an array, beginning again at row 0 after the last one.
std::vector<char> take_rows(const Array& array, int64_t begin, int64_t rows) {
  const int64_t all = array.shape.at(0), width = array.bytes.size() / all;
  std::vector<char> taken(rows * width);
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(&taken[row * width], &array.bytes[(begin + row) % all * width], width);
  return taken;
}

// The bytes of a scalar of a step, in the dtype that the manifest states.
std::vector<char> scalar(const json& entry, int64_t step, double learning_rate) {
  const auto bytes_of = [](auto number) {
    const char* begin = reinterpret_cast<const char*>(&number);
    return std::vector<char>(begin, begin + sizeof number);
  };
  const std::string name = entry["name"];
  if (name == "step") return bytes_of(step + 1);  // 1 in the first step
  if (name == "draw") return bytes_of(step);      // decides the masks of dropout
  if (name != "minus_learning_rate") throw std::runtime_error("unknown scalar " + name);
  if (entry["dtype"] == "float64") return bytes_of(-learning_rate);
  return bytes_of(static_cast<float>(-learning_rate));
}

void train(const fs::path& artifacts, const fs::path& data_path, const fs::path& state_path,
           int64_t steps) {
  std::ifstream manifest_file(artifacts / "training.json");
  if (!manifest_file) throw std::runtime_error(artifacts.string() + " has no training.json");
  const json manifest = json::parse(manifest_file);
  const auto path_of = [&](const char* key) {
    return artifacts / manifest["files"][key].get<std::string>();
  };
  File data = read_safetensors(data_path);
  File state = read_safetensors(fs::exists(state_path) ? state_path : path_of("checkpoint"));
  const double rate = manifest["learning_rate"];  // of every step here: a schedule is yours

  // The state of the training: weights, slots of the optimizer, buffers. Each has an input, and
  // an output `.new`.
  std::vector<std::string> inputs, outputs{manifest["loss"]};
  for (const char* key : {"weights", "slots", "buffers"})
    for (auto& entry : manifest[key]) {
      inputs.push_back(entry["name"]);
      outputs.push_back(inputs.back() + ".new");
    }
  const size_t count = inputs.size();
  int64_t rows = kRows;
  for (auto& entry : manifest["inputs"]) {
    inputs.push_back(entry["name"]);
    if (entry["shape"][0].is_number()) rows = entry["shape"][0];
  }
  for (auto& entry : manifest["scalars"]) inputs.push_back(entry["name"]);
  std::vector<const char*> input_names, output_names;
  for (auto& name : inputs) input_names.push_back(name.c_str());
  for (auto& name : outputs) output_names.push_back(name.c_str());

  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "train");
  Ort::Session session(env, path_of("step").c_str(), Ort::SessionOptions{});
  std::vector<Ort::Value> values;  // of all inputs; the state first
  for (size_t i = 0; i < count; ++i) {
    Array& array = named(state, inputs[i]);
    values.push_back(tensor(array.dtype, array.shape, array.bytes.data(), array.bytes.size()));
  }
  const int64_t first = std::stoll(state.metadata.value("step", "0"));
  for (int64_t step = first; step < first + steps; ++step) {
    std::vector<std::vector<char>> kept;  // the elements of this batch, until the step has run
    for (auto& entry : manifest["inputs"]) {
      const Array& array = named(data, entry["name"]);
      std::vector<int64_t> shape = array.shape;
      shape[0] = rows;
      kept.push_back(take_rows(array, step * rows, rows));
      values.push_back(tensor(array.dtype, shape, kept.back().data(), kept.back().size()));
    }
    for (auto& entry : manifest["scalars"]) {
      const std::string dtype = entry["dtype"];
      kept.push_back(scalar(entry, step, rate));
      values.push_back(tensor(dtype == "int64" ? "I64" : dtype == "float64" ? "F64" : "F32", {},
                              kept.back().data(), kept.back().size()));
    }
    auto results = session.Run(Ort::RunOptions{nullptr}, input_names.data(), values.data(),
                               values.size(), output_names.data(), output_names.size());
    const bool is_double = results[0].GetTensorTypeAndShapeInfo().GetElementType() ==
                           ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
    const double loss =
        is_double ? *results[0].GetTensorData<double>() : *results[0].GetTensorData<float>();
    if (!std::isfinite(loss))
      throw std::runtime_error("the loss of step " + std::to_string(step + 1) + " is not finite");
    std::cout << step + 1 << " " << loss << "\n";
    values.clear();
    std::move(results.begin() + 1, results.end(), std::back_inserter(values));  // the next state
  }
  for (size_t i = 0; i < count; ++i) {
    Array& array = named(state, inputs[i]);
    std::memcpy(array.bytes.data(), values[i].GetTensorRawData(), array.bytes.size());
  }
  state.metadata["step"] = std::to_string(first + steps);
  write_safetensors(state_path, state);
}

int main(int count, char** arguments) {
  if (count != 5) {
    std::cerr << "usage: train ARTIFACTS DATA STATE STEPS\n";
    return 2;
  }
  try {
    train(arguments[1], arguments[2], arguments[3], std::stoll(arguments[4]));
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
