#!/usr/bin/env bash
# Requests to a server that trains: examples/first_sketch/requests.sh [URL]
set -euo pipefail
URL=${1:-http://127.0.0.1:8000}
request() { curl --silent --show-error --fail-with-body "$@"; echo; }

request -X POST "$URL/training/checkpoint"
# The answer is not in the metadata: the server finds it by the prompt in gsm8k.jsonl.
request "$URL/v1/completions" -d '{"model":"base-model","lora_adapter":"checkpoint-0","max_tokens":16,"n":2,
  "prompt":"How many legs do 6 dogs and 4 hens have together?",
  "collect_trajectory":true,"scoring_function":"gsm8k","metadata":{"environment":"math","difficulty":"hard"}}'
request "$URL/v1/training/update" -d '{"trajectories":[
  {"prompt":"2 + 2 =","output":" 4","reward":1},{"prompt":"2 + 2 =","output":" 5","reward":0}],
  "update_inference":true,"checkpoint_name":"manual-update-1"}'
request "$URL/v1/training/status"
request "$URL/debug/training"
request -X POST "$URL/model/switch-lora" -d '{"version":"manual-update-1"}'
request "$URL/metrics" | grep -E '^mlx_parallm_(rl_trajectories_collected|rl_training_loss|rl_updates_per_second|lora_swaps_total|checkpoint_saves_total)'
