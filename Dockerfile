# docker build -t onnxgrad .
# docker run --rm -v "$PWD:/data" --user "$(id -u)" onnxgrad trainable model.onnx
FROM python:3.11-slim
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install --no-cache-dir /source && rm -r /source && useradd --create-home onnxgrad
USER onnxgrad
WORKDIR /data
ENTRYPOINT ["onnxgrad"]
