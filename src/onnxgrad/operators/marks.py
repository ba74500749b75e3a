"""Keys of `meta`: notes on nodes, values and graphs, from the code that writes them to its reader.

Files do not have them. The comment on a key says what `meta` holds there, which module writes it,
and which reads it.
"""

# -- of values -------------------------------------------------------------------------------------

# the value that is read instead of this one: graph/tidy writes and reads it, graph/rewrite reads it
REPLACED = "onnxgrad.replaced"

# the output of the model of which this is a copy: autodiff/primal/prepare writes and reads it
LISTED_AS = "onnxgrad.listed_as"

# elements and stated shape of an input with a default: autodiff/primal/prepare writes and reads it
INPUT_DEFAULT = "onnxgrad.input_default"

# True for a sequence without elements: operators/sequences writes and reads it
EMPTY_SEQUENCE = "onnxgrad.empty_sequence"

# position and element in a sequence of zeros: operators/sequences writes and reads it
SCATTERED = "onnxgrad.scattered"

# True for the scores -z and z of two classes: operators/ml writes it, losses/logits reads it
# and passes it on
OPPOSITE = "onnxgrad.opposite"

# why these are no scores of classes: operators/ml writes, losses/logits reads it
NOT_CLASSES = "onnxgrad.not_classes"

# how many keys before the query a condition admits: operators/attention writes it,
# autodiff/attention_blocks reads it
FIRST_KEY = "onnxgrad.first_key"

# how many keys behind the query a condition admits: operators/attention writes it,
# autodiff/attention_blocks reads it
LAST_KEY = "onnxgrad.last_key"

# node, operand and cotangents of a gradient: autodiff/reverse writes it, native/blocked_pointwise
# reads it
GRADIENT_OF = "onnxgrad.gradient_of"

# image, cotangent, windows and groups of the gradient of a convolution's weight:
# autodiff/forms/convolutions writes, native/blocked reads it
WEIGHT_GRADIENT = "onnxgrad.weight_gradient"

# gradient of the input of a MaxPool, and its cotangent: autodiff/forms/scatters writes,
# native/max_pools reads it
POOL_GRADIENT = "onnxgrad.pool_gradient"

# the same image in blocks of channels: native/blocked_layout writes and reads it
BLOCKED_IMAGE = "onnxgrad.blocked_image"

# image, scale and epsilon of a normalization: native/blocked_pointwise writes and reads it
NORMALIZED_IMAGE = "onnxgrad.normalized_image"

# lower bounds of height and width of images: data/image_nodes writes and reads it
LEAST_SIDES = "onnxgrad.least_sides"

# the same sum by the formula without blocks: losses/vocabulary writes it, training/evaluator
# and training/run/row_parts read it
PLAIN_SUM = "onnxgrad.plain_sum"

# returns the shape of this label for the shape of its prediction: losses/in_graph writes it,
# losses/spec and training/diagnose read it
LABEL_SHAPE = "onnxgrad.label_shape"

# the feed of an input, whose values follow from the call: training/step/inputs writes and reads it
FEED = "onnxgrad.feed"

# -- of nodes --------------------------------------------------------------------------------------

# the emitter that wrote a node or a constant, as a token: graph/emit writes and reads it
EMITTER = "onnxgrad.emitter"

# the node whose gradient this node helps to compute: graph/emit writes it, graph/rewrite
# and autodiff/derivative read it
PRIMAL = "onnxgrad.primal"

# returns the node that a user's rule of another operator reads: training/modes/dropouts writes,
# autodiff/reverse reads it
RULED_AS = "onnxgrad.ruled_as"

# the weight of a MatMulNBits, unpacked already: losses/head writes, operators/quantization reads it
UNPACKED = "onnxgrad.unpacked"

# True for a Scan that the backward pass computes again: autodiff/attention_blocks writes,
# autodiff/control/subgraph_rules reads it
KEEPS_NOTHING = "onnxgrad.keeps_nothing"

# -- of graphs -------------------------------------------------------------------------------------

# the nodes that were removed from the graph: graph/tidy writes and reads it
REMOVED = "onnxgrad.removed"

# declared ranks of the outputs of a Scan's body: graph/infer writes, graph/walk
# reads it
DECLARED_RANKS = "onnxgrad.declared_ranks"

# symbols that `name_rows` replaced: graph/infer writes, training/fields reads it
ROW_SYMBOLS = "onnxgrad.row_symbols"

# title of a BatchNormalization that trains on one value a channel for each row:
# training/modes/training_form writes, training/fields reads it
ONE_VALUE_NODE = "onnxgrad.one_value_node"
