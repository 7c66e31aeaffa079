# Settings of sgl-project/sglang, docs/advanced_features/sgl_model_gateway.md, "Prefill-Decode
# Disaggregation", commit 0f4513c2f46be5ae1e0d9bf0a8f7b5471a8b3d16, Apache-2.0.
python -m sglang_router.launch_router \
  --pd-disaggregation \
  --prefill http://prefill1:30001 9001 \
  --decode http://decode1:30011 \
  --prefill-policy cache_aware \
  --decode-policy power_of_two
