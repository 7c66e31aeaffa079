# Settings of sgl-project/sglang, docs/advanced_features/sgl_model_gateway.md, "Kubernetes Deployment",
# commit 0f4513c2f46be5ae1e0d9bf0a8f7b5471a8b3d16, Apache-2.0.
python -m sglang_router.launch_router \
  --service-discovery \
  --pd-disaggregation \
  --prefill-selector app=sglang-worker component=prefill \
  --decode-selector app=sglang-worker component=decode \
  --service-discovery-namespace production
