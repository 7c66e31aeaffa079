# Settings of vllm-project/router, docs/cli_reference.md, "Prefill/decode disaggregation", commit
# df71929b7ffb7864ebd7dcf71efbaf704612a83c, Apache-2.0.
vllm-router --vllm-pd-disaggregation \
  --prefill http://prefill-1:8000 9000 \
  --prefill http://prefill-2:8000 none \
  --decode http://decode-1:8001 --decode http://decode-2:8001 \
  --prefill-policy cache_aware --decode-policy power_of_two
