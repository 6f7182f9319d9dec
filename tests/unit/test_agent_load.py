from __future__ import annotations

from replica_agent.load import EngineMetrics, parse_metrics

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="odd \\"} name"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.125
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+06
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="4096"} 1.0
process_start_time_seconds 1.79596e+09
"""


def test_vllm() -> None:
    assert parse_metrics(VLLM) == EngineMetrics(
        engine="vllm",
        running=3,
        waiting=2,
        kv_usage=0.125,
        block_size=128,
        capacity_blocks=4096,
        prompt_tokens=1.5e6,
        start_time=1.79596e9,
    )


def test_another_rank_of_the_same_engine() -> None:
    assert parse_metrics(VLLM, dp_rank=1).running == 5


def test_reference_engine_and_sglang() -> None:
    page = VLLM + b'reference_engine:queued_prefill_tokens{engine="0",model_name="m"} 700.0\n'
    assert (parse_metrics(page).engine, parse_metrics(page).queued_prefill_tokens) == ("reference_engine", 700)
    page = (
        b'sglang:num_running_reqs{model_name="m"} 4\nsglang:num_queue_reqs{model_name="m"} 1\nsglang:token_usage 0.5\n'
    )
    assert parse_metrics(page) == EngineMetrics(engine="sglang", running=4, waiting=1, kv_usage=0.5)


def test_what_is_no_number_is_not_said() -> None:
    page = b"vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:kv_cache_usage_perc x\n\xff\xfe{"
    assert parse_metrics(page) == EngineMetrics(engine=None)
    assert parse_metrics(b"") == EngineMetrics()
