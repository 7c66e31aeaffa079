# Settings of sgl-project/sglang, docs/advanced_features/sgl_model_gateway.md, "Separate Launch (HTTP)",
# commit 0f4513c2f46be5ae1e0d9bf0a8f7b5471a8b3d16, Apache-2.0.
python -m sglang_router.launch_router \
  --worker-urls http://worker1:8000 http://worker2:8001 \
  --policy cache_aware \
  --host 0.0.0.0 --port 30000
