# Settings of sgl-project/sglang, docs/advanced_features/sgl_model_gateway.md, "Co-launch Router and
# Workers", commit 0f4513c2f46be5ae1e0d9bf0a8f7b5471a8b3d16, Apache-2.0.
python -m sglang_router.launch_server \
  --host 0.0.0.0 --port 8080 \
  --model meta-llama/Llama-3.1-8B-Instruct \
  --tp-size 1 --dp-size 8 \
  --grpc-mode \
  --log-level debug \
  --router-prometheus-port 10001 \
  --router-tool-call-parser llama \
  --router-model-path meta-llama/Llama-3.1-8B-Instruct \
  --router-policy round_robin \
  --router-log-level debug
