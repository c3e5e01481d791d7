"""`lm_eval` on two tasks of our own: one that scores choices by echo and logprobs, one that generates."""
import json

from clients.bench import DATA, Bench, check
from clients.client import Client
from clients.environments import Packages

COMMON = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(DATA / "lm_eval" / "questions.jsonl")}, "test_split": "train"}
CHOICES = {
    "task": "questions_choices", **COMMON, "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
}
GENERATE = {
    "task": "questions_generate", **COMMON, "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}, "metric_list": [{"metric": "exact_match"}],
}
NUM_QUESTIONS = 6


def run(bench: Bench) -> str:
    tasks = bench.folder / "tasks"
    tasks.mkdir()
    for task in (CHOICES, GENERATE):
        (tasks / f"{task['task']}.yaml").write_text(json.dumps(task))  # JSON is YAML
    completions = evaluate(bench, "local-completions", "/v1/completions", "questions_choices,questions_generate")
    accuracy = completions["results"]["questions_choices"]["acc,none"]
    check(accuracy >= 0.5, f"accuracy {accuracy}: a guess would be right in a third")
    chat = evaluate(bench, "local-chat-completions", "/v1/chat/completions", "questions_generate", "--apply_chat_template")
    for report in (completions, chat):
        counts = report["n-samples"]["questions_generate"]
        check(counts["effective"] == NUM_QUESTIONS, f"answers to {counts} questions")
    return f"{NUM_QUESTIONS} questions: choices by logprobs (accuracy {accuracy:.2f}), generation by completions and chat"


def evaluate(bench: Bench, kind: str, path: str, tasks: str, *options: str) -> dict:
    arguments = f"base_url={bench.url}{path},model={bench.model},tokenizer={bench.tokenizer},num_concurrent=2,tokenized_requests=False,max_retries=1"
    bench.run(bench.environment.program("lm_eval"), "run", "--model", kind, "--model_args", arguments, "--include_path", "tasks", "--tasks", tasks,
              "--output_path", f"{kind}.json", "--log_samples", *options)
    reports = sorted(bench.folder.glob(f"{kind}*.json")) + sorted(bench.folder.glob(f"{kind}*/**/results*.json"))
    check(reports, "the client wrote no report")
    for samples in bench.folder.glob(f"**/{'samples_questions_generate'}*.jsonl"):
        for line in samples.read_text().splitlines():
            check(json.loads(line)["resps"][0][0].strip(), f"an empty answer: {line[:300]}")
    return json.loads(reports[-1].read_text())


LM_EVAL = Client("lm-eval", "0.4.13", "multiple choice by echo and logprobs, generation by completions and chat",
                 Packages(("lm_eval[api]==0.4.13",), shares_torch=True), run)
