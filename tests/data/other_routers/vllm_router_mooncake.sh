# Settings of vllm-project/router, README.md, "Prefill-Decode Disaggregation", commit
# 03e9af5c1982f7568d79021d80d812edecb2d702, Apache-2.0.
vllm-router \
    --policy consistent_hash \
    --vllm-pd-disaggregation \
    --kv-connector mooncake \
    --prefill http://127.0.0.1:8081 \
    --prefill http://127.0.0.1:8082 \
    --decode http://127.0.0.1:8083 \
    --decode http://127.0.0.1:8084 \
    --host 127.0.0.1 \
    --port 8090 \
    --intra-node-data-parallel-size 1
