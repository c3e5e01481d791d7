"""llama.cpp in this process, through the bindings of the package llama-cpp-python (which holds no server that takes token ids)."""
import time

import llama_cpp
import numpy as np

Prompts = list[list[int]]


class LlamaCpp:
    """A GGUF file as it is. Sequence 0 keeps its last prompt, so that a prompt with the same beginning is only computed from there on."""

    def __init__(self, path: str, num_threads: int, max_tokens: int = 1 << 14, max_sequences: int = 16):
        """max_tokens: of all sequences together, and of one batch."""
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = max_tokens, 2048, 512, max_sequences
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True  # else each sequence gets an equal share of the context
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._kept: list[int] = []

    def first_token_s(self, prompt: list[int]) -> float:
        begin = time.perf_counter()
        same = next((i for i, (a, b) in enumerate(zip(self._kept, prompt)) if a != b), min(len(self._kept), len(prompt)))
        same = min(same, len(prompt) - 1)
        llama_cpp.llama_memory_seq_rm(self._memory, 0, same, -1)
        for first in range(same, len(prompt), 2048):
            part = prompt[first:first + 2048]
            self._run([(token, first + i, 0, first + i == len(prompt) - 1) for i, token in enumerate(part)])
        self._best(len(part) - 1)
        self._kept = list(prompt)
        return time.perf_counter() - begin

    def decode(self, prompts: Prompts, num_new: int) -> float:
        """Tokens per second of all prompts together, after the first token of each."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self._kept = []
        tokens = []
        for sequence, prompt in enumerate(prompts):
            self._run([(token, at, sequence, at == len(prompt) - 1) for at, token in enumerate(prompt)])
            tokens.append(self._best(len(prompt) - 1))
        begin = time.perf_counter()
        for step in range(num_new - 1):
            self._run([(token, len(prompts[sequence]) + step, sequence, True) for sequence, token in enumerate(tokens)])
            tokens = [self._best(sequence) for sequence in range(len(tokens))]
        return len(prompts) * (num_new - 1) / (time.perf_counter() - begin)

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, logits wanted) of one batch."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode: {code}")

    def _best(self, index: int) -> int:
        """Greedy token of an entry of the last batch."""
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, index), (self._vocab_size,)).argmax())
