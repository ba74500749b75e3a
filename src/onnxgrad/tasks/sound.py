"""`Sound`: wake words, classes of sounds, and events in streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import onnxgrad as og
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.tasks.base import Task, as_proto, stored_classes, with_classes, with_fields, write_csv
from onnxgrad.tasks.sound_model import SoundModel, WindowStreams

__all__ = ["Heard", "Sound"]


@dataclass(frozen=True, eq=False)
class Heard:
    """The events and the scores that a model finds in a sound file.

    Attributes:
        times: second at which each window begins, (windows,).
        scores: probability of each class in each window, (windows, classes).
        events: (start, end, class, score), in seconds; the score is the largest of its windows.
        label: of several classes, the one of the largest mean score; of one, its name if there is
            an event, and None without.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.tasks.sound import Heard
        >>> Heard(np.zeros(1), np.ones((1, 1)), [(0.0, 1.0, "alexa", 0.9)], "alexa").label
        'alexa'
    """

    times: np.ndarray
    scores: np.ndarray
    events: list[tuple[float, float, str, float]]
    label: str | None


@with_fields
class Sound(Task):
    """Sounds: training and prediction of a wake word, of classes, or of events in streams.

    `data` are read by `og.data.sound_folder`: a folder of folders, one a class, or a list. A row
    is a clip, in the length of the model. With `carry`, a row is a window of a file, and states
    begin anew with each file, at zero; a window has the label that covers half of it or
    more. The gradient does not pass from batch to batch.

    The loss is the cross-entropy of the classes, or of one score for `word`. `trainer` takes
    `class_weight` for rare ones.

    Args:
        model: takes waveforms (N, samples) or (N, 1, samples), or what `front` returns.
        data: path of the folder or list.
        validation: other files, in either form.
        rate: sample rate of the model in Hz; files of other rates are resampled.
        seconds: length of a window, if the shape of the input does not state it.
        front: from float32 (N, samples) to features, such as `onnxgrad.data.mel_spectrogram`; their
            last two axes are swapped, and an axis of length 1 is added, where the input says so.
        word: the class that a model with one score detects; all others are the background.
        classes: names of the units of the model, in their order; None: as in the data, sorted.
            A model with another number of units gets a new last layer, by `replace_head`. The model
            that comes out stores them, as `onnxgrad.classes`; `word` too.
        background: the class that is no event. A stream of several classes has it for what has no
            label, and first, unless `classes` says otherwise.
        carry: `{input: output}`, states that go from window to window.
        context: samples of the window before that are part of the input, in front of a window.
        constants: values of further inputs; None: of one called "sr", the sample rate.
        files: files of a stream side by side in a batch; of a model whose states have no rows, the
            consecutive windows of one file, through which the gradient passes.
        shift, gain, noise, snr: of random changes of clips in training, see `og.data.sound_folder`.
        output: name of the output of scores, if several could be.
        activation: "sigmoid" or "softmax", which makes probabilities of outputs; "none" if they are
            such. None: by `are_probabilities`.

    Raises:
        ValueError: files that cannot be read, classes that do not fit, or inputs of unknown length.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,4] x) => (float[N,1] p) <float[4,1] w = {1, 1, 1, 1}>
        ...     { a = MatMul(x, w)  p = Sigmoid(a) }''')
        >>> task = og.tasks.sound.Sound(model, rate=2, word="beep")
        >>> (heard,) = task.predict(model, [np.float32([0, 0, 0, 0, 1, 1, 1, 1])], threshold=0.9)
        >>> [(start, end, label) for start, end, label, score in heard.events]
        [(2.0, 4.0, 'beep')]
    """

    remembered = tuple(
        "rate seconds front word background carry context constants output activation".split()
    )

    model: Any
    data: Any = None
    _: KW_ONLY
    validation: Any = None
    rate: int = 16000
    seconds: float | None = None
    front: Callable[[np.ndarray], Any] | None = None
    word: str | None = None
    classes: InitVar[Sequence[str] | None] = None
    background: str = "background"
    carry: Mapping[str, str] | None = None
    context: int = 0
    constants: Mapping[str, Any] | None = None
    files: int = 8
    shift: float = 0.0
    gain: float = 0.0
    noise: str | os.PathLike | None = None
    snr: tuple[float, float] = (0.0, 20.0)
    output: str | None = None
    activation: str | None = None

    def __post_init__(self, classes: Sequence[str] | None) -> None:
        self.model, folder = as_proto(self.model), None
        self.form = form = SoundModel(self.model, self)
        if self.data is not None:
            changes = {name: getattr(self, name) for name in ("shift", "gain", "noise", "snr")}
            folder = self._open_sound_folder(self.data, **changes)
        stored = stored_classes(self.model)
        if self.word is None and classes is None and form.units == len(stored) == 1:
            self.word = stored[0]
        self.classes = self._choose_class_names(classes, [] if folder is None else folder.classes)
        if form.units != len(self.classes):
            if folder is None:
                raise ValueError(
                    f"the output {form.output!r} has {form.units} units, and the classes are "
                    f"{self.classes}: name as many classes, or pass data="
                )
            self.model = og.replace_head(self.model, self.classes, output=form.output)
            self.form = form = SoundModel(self.model, self)
        one = len(self.classes) == 1
        self.activation = self.activation or form.activation or ("sigmoid" if one else "softmax")
        loss = "binary_cross_entropy" if one else "cross_entropy"
        self.loss = loss if form.single else {form.output: loss}
        alarms = [og.metrics.FalseAlarms(form.samples / self.rate)]
        self.metrics = ["accuracy", *(alarms if one and not form.carry else [])]
        self.arguments = {"carry": form.carry}
        if form.batches_along_file:
            self.arguments["batch_axes"] = dict.fromkeys(form.carry)
        if folder is not None:
            self.model = with_classes(self.model, self.classes)
            self.data = self._labeled_reader(folder)
        self.validation = None if self.validation is None else self.read(self.validation)

    def _open_sound_folder(self, path: str | os.PathLike, **changes: Any) -> Any:
        form = self.form
        seconds = form.samples / form.rate
        return og.data.sound_folder(path, form.rate, seconds, form.model_inputs, **changes)

    def _choose_class_names(self, given: Sequence[str] | None, found: Sequence[str]) -> list[str]:
        """Return the class names: the wake word, or `given`, or `found` in the data, or the
        model's.
        """
        if self.word is not None:
            if found and self.word not in found:
                raise ValueError(f"word={self.word!r} is the label of no clip: pass one of {found}")
            return [self.word]
        if given is not None:
            return list(given)
        if found:
            found = [name for name in found if name]
            if self.form.carry:
                found = [self.background, *(c for c in found if c != self.background)]
            if len(found) < 2:
                raise ValueError(
                    f"the clips have the only class {found}: add clips of another class, or pass "
                    "the name of the class as word="
                )
            return found
        units = self.form.units if isinstance(self.form.units, int) else 0
        return stored_classes(self.model) or [str(i) for i in range(units)]

    def trainer(self, **arguments: Any) -> og.Trainer:
        """Return a trainer of the model; `arguments` of a `Trainer` override the task's."""
        weights, output = arguments.get("class_weight"), self.form.output
        by_output = isinstance(weights, Mapping) and output in weights
        if weights is not None and not self.form.single and not by_output:
            arguments["class_weight"] = {output: weights}
        return super().trainer(**arguments)

    def read(self, path: str | os.PathLike) -> og.data.Reader:
        """Return a reader of further clips or streams, without random changes.

        Raises:
            ValueError: files that cannot be read, or a class that the model does not have.
        """
        return self._labeled_reader(self._open_sound_folder(path))

    def _labeled_reader(self, folder: Any) -> og.data.Reader:
        """Return the reader of labeled clips; for a model with states, of consecutive windows."""
        for clip in folder.clips:
            if self.word is None and (clip.label or self.background) not in self.classes:
                raise ValueError(
                    f"{str(clip.file)!r} has the label {clip.label!r}, which is none of the "
                    f"classes {self.classes}: correct it, or leave the clip out"
                )
        if self.form.carry:
            return WindowStreams(folder, partial(self._read_windows, folder.augment), self)
        folder.labels = self._label_arrays([clip.label for clip in folder.clips])
        return folder

    def _label_arrays(self, names: Sequence[str]) -> np.ndarray:
        """Return the label arrays for the loss, from the class name of each clip or window."""
        if self.word is not None:
            numbers = np.array([name == self.word for name in names], np.int64)
        else:
            numbers = np.array([self.classes.index(name or self.background) for name in names])
        one = len(self.classes) == 1
        labels = numbers.reshape(-1, *[1] * (len(self.form.out) - (1 if one else 2)))
        return labels.astype(np.float32) if one else labels

    def _read_windows(
        self, augment: Callable[..., np.ndarray], clips: list, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the windows of the file of `clips`, and the label of each window."""
        form = self.form
        x = augment(og.data.read_wave(clips[0].file, form.rate), rng)
        windows, first = form.cut_windows(x, form.samples)
        starts, size = first / form.rate, form.samples / form.rate
        names = np.full(len(windows), "", object)
        for clip in clips:
            end = np.inf if clip.end is None else clip.end
            within = np.minimum(end, starts + size) - np.maximum(clip.start, starts)
            names[within >= size / 2] = clip.label
        return windows, self._label_arrays(names.tolist())

    def predict(
        self,
        model: Any,
        inputs: Any,
        *,
        hop: float | None = None,
        threshold: float = 0.5,
        hold: float = 0.0,
    ) -> list[Heard]:
        """Return the events and scores that are heard in each file.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a folder, a file, files, or waveforms (samples,) at the rate of the model.
            hop: seconds from one window to the next; None: their length. The last window ends with
                the file, or of a model with states, in zeros.
            threshold: the probability from which a window is one of an event; of several classes,
                it must be the largest, too.
            hold: seconds; windows of a class that are at most so far apart are one event.

        Raises:
            ValueError: a file that cannot be read; `hop` of a model with states.
        """
        form = self.form
        if hop is not None and form.carry:
            raise ValueError(
                f"hop={hop}: the windows of a model with states follow each other: leave out hop="
            )
        step = form.samples if hop is None else max(1, round(hop * form.rate))
        predictor, results = Predictor(as_proto(model)), []
        for name, given in og.data.list_sounds(inputs):
            path = isinstance(given, Path)
            x = og.data.read_wave(given, form.rate) if path else np.asarray(given, np.float32)
            if x.ndim != 1 or not len(x):
                raise ValueError(
                    f"the waveform {name!r} must have the shape (samples,), not {x.shape}"
                )
            if not form.carry and (missing := form.samples - len(x)) > 0:
                x = np.pad(x, (-(-missing // 2), missing // 2))
            windows, starts = form.cut_windows(x, step)
            scores = form.window_scores(predictor, windows, self.activation)
            # most window steps between two windows of one event
            gap = 1 + int(hold / (step / form.rate) + 1e-9)
            results.append(self._find_events(scores, starts / form.rate, threshold, gap))
        return results

    def _find_events(
        self, scores: np.ndarray, starts: np.ndarray, threshold: float, gap: int
    ) -> Heard:
        """Return the events in the scores of windows: runs of windows over the threshold."""
        best, events, size = scores.argmax(axis=1), [], self.form.samples / self.form.rate
        for k, name in enumerate(self.classes):
            over = np.flatnonzero((scores[:, k] >= threshold) & (best == k))
            if name == self.background or not len(over):
                continue
            for run in np.split(over, np.flatnonzero(np.diff(over) > gap) + 1):
                score = float(scores[run, k].max())
                events.append((float(starts[run[0]]), float(starts[run[-1]] + size), name, score))
        most = self.classes[int(scores.mean(axis=0).argmax())]
        label = most if events or len(self.classes) > 1 else None
        return Heard(starts, scores, sorted(events), label)

    def describe_results(self, results: Sequence[Heard]) -> str:
        """Return the count of files and the count of events heard, as text."""
        return f"{len(results)} files, {sum(len(each.events) for each in results)} events"

    def write(self, inputs: Any, results: Iterable[Heard], folder: str | os.PathLike) -> list[Path]:
        """Write events into `events.csv`, and a label track of Audacity, `.txt`, for each file.

        Args:
            inputs: as of `predict`.
            results: what `predict` returned for them.
            folder: is created; files in it of the same names are replaced.
        """
        folder = Path(folder)
        heard = [
            (name, each)
            for (name, _), each in zip(og.data.list_sounds(inputs), results, strict=True)
        ]
        rows = ([name, *event] for name, each in heard for event in each.events)
        written = [
            write_csv(folder / "events.csv", ["file", "start", "end", "label", "score"], rows)
        ]
        for name, each in heard:
            track = folder / f"{Path(name).stem}.txt"
            if track in written:
                track = folder / f"{Path(name).stem}-{len(written)}.txt"
            lines = (f"{start:.6f}\t{end:.6f}\t{label}\n" for start, end, label, _ in each.events)
            track.write_text("".join(lines), encoding="utf-8")
            written.append(track)
        return written
