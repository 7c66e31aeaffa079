# Settings of sgl-project/sglang, docs/advanced_features/sgl_model_gateway.md, "gRPC Routing",
# commit 0f4513c2f46be5ae1e0d9bf0a8f7b5471a8b3d16, Apache-2.0.
python -m sglang_router.launch_router \
  --worker-urls grpc://127.0.0.1:20000 \
  --model-path meta-llama/Llama-3.1-8B-Instruct \
  --reasoning-parser deepseek-r1 \
  --tool-call-parser json \
  --host 0.0.0.0 --port 8080
