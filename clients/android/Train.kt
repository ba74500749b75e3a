/**
 * Train a model by the files of `og.artifacts.generate_artifacts`, and save the state.
 *
 * `data` is a .safetensors file with a tensor for each input of a batch; the rows are along the
 * first axis. `saved` is a .safetensors file: training goes on from it if it exists, and it is
 * replaced. Call `train` in a thread of its own, never in the one of the user interface.
 */
import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import org.json.JSONArray
import org.json.JSONObject

const val ROWS = 32 // rows of a batch, unless the model fixes their number

fun train(artifacts: File, data: File, saved: File, steps: Int): Double {
    val manifest = JSONObject(File(artifacts, "training.json").readText())
    val files = manifest.getJSONObject("files")
    val batchInputs = manifest.getJSONArray("inputs").objects()
    val scalars = manifest.getJSONArray("scalars").objects()
    val rate = manifest.getDouble("learning_rate") // of every step here: a schedule is yours
    val lossName = manifest.getString("loss")
    val rows = batchInputs.map { it.getJSONArray("shape").get(0) }
        .filterIsInstance<Number>().firstOrNull()?.toInt() ?: ROWS

    val columns = readSafetensors(data).arrays
    val checkpoint = File(artifacts, files.getString("checkpoint"))
    val file = readSafetensors(if (saved.exists()) saved else checkpoint)
    val first = file.metadata.optString("step", "0").toLong()
    // The state of the training: weights, slots of the optimizer, buffers. Each has an input, and
    // an output `.new`.
    val names = listOf("weights", "slots", "buffers")
        .flatMap { manifest.getJSONArray(it).objects() }.map { it.getString("name") }
    val outputs = names.map { "$it.new" }.toSet() + lossName
    var loss = Double.NaN

    val environment = OrtEnvironment.getEnvironment()
    val model = File(artifacts, files.getString("step")).path
    environment.createSession(model, OrtSession.SessionOptions()).use { session ->
        val initial = names.associateWith { file.arrays.getValue(it).toTensor(environment) }
        var state: Map<String, OnnxTensor> = initial
        var kept: OrtSession.Result? = null // owns the tensors of `state`
        try {
            for (step in first until first + steps) {
                val batch = batchInputs.map { it.getString("name") }.associateWith {
                    columns.getValue(it).takeRows(step * rows, rows).toTensor(environment)
                } + scalars.associate {
                    it.getString("name") to scalar(it, step, rate).toTensor(environment)
                }
                val results = session.run(state + batch, outputs)
                batch.values.forEach { it.close() }
                kept?.close() // the tensors before
                kept = results
                state = names.associateWith { results.get("$it.new").get() as OnnxTensor }
                loss = (results.get(lossName).get().value as Number).toDouble()
                check(loss.isFinite()) { "the loss of step ${step + 1} is $loss" }
            }
            val arrays = names.associateWith { name ->
                StoredArray(file.arrays.getValue(name).dtype, state.getValue(name))
            }
            file.metadata.put("step", "${first + steps}")
            writeSafetensors(saved, SafetensorsFile(arrays, file.metadata))
        } finally {
            kept?.close()
            initial.values.forEach { it.close() }
        }
    }
    return loss
}

/** A scalar of a step, in the dtype that the manifest states. */
fun scalar(entry: JSONObject, step: Long, rate: Double): StoredArray {
    val bytes = ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN)
    val double = entry.getString("dtype") == "float64"
    when (val name = entry.getString("name")) {
        "step" -> bytes.putLong(step + 1) // 1 in the first step
        "draw" -> bytes.putLong(step) // decides the masks of dropout
        "minus_learning_rate" ->
            if (double) bytes.putDouble(-rate) else bytes.putFloat((-rate).toFloat())
        else -> error("unknown scalar $name")
    }
    val dtype = mapOf("int64" to "I64", "float64" to "F64", "float32" to "F32")
    bytes.flip()
    return StoredArray(dtype.getValue(entry.getString("dtype")), longArrayOf(), bytes)
}

private val TYPES = mapOf(
    "F32" to OnnxJavaType.FLOAT,
    "F64" to OnnxJavaType.DOUBLE,
    "I64" to OnnxJavaType.INT64,
    "I32" to OnnxJavaType.INT32,
    "I16" to OnnxJavaType.INT16,
    "I8" to OnnxJavaType.INT8,
    "U8" to OnnxJavaType.UINT8,
    "BOOL" to OnnxJavaType.BOOL,
)

/** An array of a .safetensors file: `dtype` as in the file, such as "F32"; little-endian bytes. */
class StoredArray(val dtype: String, val shape: LongArray, val bytes: ByteBuffer) {
    constructor(dtype: String, tensor: OnnxTensor) :
        this(dtype, tensor.info.shape, tensor.byteBuffer)

    /** Rows from `begin` on, beginning again at row 0 after the last one. */
    fun takeRows(begin: Long, rows: Int): StoredArray {
        val width = bytes.capacity() / shape[0].toInt()
        val taken = ByteBuffer.allocate(rows * width)
        for (row in begin until begin + rows) {
            val at = (row % shape[0]).toInt() * width
            val one = bytes.duplicate()
            one.position(at).limit(at + width)
            taken.put(one)
        }
        taken.flip()
        return StoredArray(dtype, longArrayOf(rows.toLong()) + shape.drop(1), taken)
    }

    fun toTensor(environment: OrtEnvironment): OnnxTensor {
        val direct = ByteBuffer.allocateDirect(bytes.limit()).order(ByteOrder.nativeOrder())
        direct.put(bytes.duplicate()).flip()
        return OnnxTensor.createTensor(environment, direct, shape, TYPES.getValue(dtype))
    }
}

class SafetensorsFile(val arrays: Map<String, StoredArray>, val metadata: JSONObject)

/** Read 8 bytes, the length of a header in JSON; the header; the elements. */
fun readSafetensors(path: File): SafetensorsFile {
    val content = path.readBytes()
    val length = ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN).getLong().toInt()
    val header = JSONObject(String(content, 8, length))
    val metadata = header.optJSONObject("__metadata__") ?: JSONObject()
    header.remove("__metadata__")
    val arrays = header.keys().asSequence().associateWith { name ->
        val entry = header.getJSONObject(name)
        val shape = entry.getJSONArray("shape")
        val offsets = entry.getJSONArray("data_offsets")
        val (begin, end) = listOf(offsets.getInt(0), offsets.getInt(1))
        val bytes = ByteBuffer.wrap(content.copyOfRange(8 + length + begin, 8 + length + end))
        val lengths = LongArray(shape.length()) { shape.getLong(it) }
        StoredArray(entry.getString("dtype"), lengths, bytes)
    }
    return SafetensorsFile(arrays, metadata)
}

/** Write a file, which replaces an older one only when it is complete. */
fun writeSafetensors(path: File, file: SafetensorsFile) {
    val header = JSONObject().put("__metadata__", file.metadata)
    var end = 0
    for ((name, array) in file.arrays) {
        val begin = end
        end += array.bytes.limit()
        header.put(
            name,
            JSONObject().put("dtype", array.dtype).put("shape", JSONArray(array.shape.toList()))
                .put("data_offsets", JSONArray(listOf(begin, end))),
        )
    }
    var text = header.toString().toByteArray()
    text += ByteArray((8 - text.size % 8) % 8) { ' '.code.toByte() }
    val content = ByteBuffer.allocate(8 + text.size + end).order(ByteOrder.LITTLE_ENDIAN)
    content.putLong(text.size.toLong()).put(text)
    file.arrays.values.forEach { content.put(it.bytes.duplicate()) }
    val partial = File("${path.path}.partial")
    partial.writeBytes(content.array())
    check(partial.renameTo(path)) { "$path cannot be replaced" }
}

fun JSONArray.objects() = (0 until length()).map { getJSONObject(it) }
