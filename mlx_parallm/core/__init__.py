"""The data types and protocols that all packages share. This package imports none of the others, no MLX and no HTTP.

The server builds a `GenerationRequest`, the engine answers it with a stream of events, and neither knows how the other
works. Objects that one package passes to another are frozen.

Glossary:
    request: one call of a client. It has one or more sequences.
    sequence: one row of a batch. `n=4` is four sequences, which are a prompt group.
    row: a live sequence's keys and values in the KV pool, and its place in the batch.
    block: the keys and values of 64 consecutive tokens of a row. Rows share full blocks by reference.
    prefix cache: blocks that are kept for later prompts that begin with the same tokens.
    prefill, decode: computing a prompt's keys and values, in chunks; sampling one token for each row.
    unit: one uninterrupted piece of work on the device thread: a forward pass, staging, or a part of a training
        micro-step.
    forward unit, step: one forward pass over decode rows, of one token each, and chunks of prompts; one that has decode
        rows, also called a decode step.
    adapter, adapter version: a set of LoRA weights with a name; an immutable version of it, `AdapterRef`.
    bank, slot: the stacked weights of all adapters on the device; one version's place there.
    staging: copying a version's weights into a slot.
    publish: making a version the live one, which the name without a version means.
    lease, pin: keeps a version until the request that uses it ends; keeps a slot until the row that uses it ends.
    rollout, trajectory: a sequence sampled as training data; its tokens, logprobs and reward.
    group, advantage: the trajectories of one prompt; the result of comparing one's reward with the others'.
    behaviour policy: the distribution that sampled a token. Its logprobs are `sampling_logprobs`; the trainer's are
        `trainer_logprobs`.
    staleness: the number of versions between the behaviour policy and the policy in training.
    micro-step, update: one micro-batch forward and backward; one optimizer step.
    checkpoint: a version on disk, with the optimizer's state if it was trained here.
"""
