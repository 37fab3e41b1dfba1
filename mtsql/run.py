"""From options to the objects of a run: dataset, environment, scorer, policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from filelock import FileLock
from tqdm import tqdm
from transformers import PreTrainedModel

from mtsql.agent.env import Environment, Episode
from mtsql.agent.rollout import rollout, trajectory_seed
from mtsql.agent.served import SECONDS, ServedPolicy, find_protocol, play_served
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory, trajectory_record
from mtsql.config import (
    AddressOptions,
    AgentOptions,
    ChatConfig,
    CurriculumConfig,
    GrpoConfig,
    PolicyOptions,
    RewardOptions,
    ServedOptions,
    SftConfig,
    TrainingOptions,
    idle_options,
)
from mtsql.data.datasets import (
    Dataset,
    Dialogue,
    Example,
    examples,
)
from mtsql.errors import UserError, printable
from mtsql.files import hold_folder, write_atomically
from mtsql.http_client import Server, ServerError, check_address, read_key
from mtsql.learn.checkpoint import load_training_state, new_checkpoint, newest_checkpoint, save_training_state
from mtsql.learn.curriculum import SuccessCount
from mtsql.learn.model import (
    Reference,
    has_adapter,
    load_policy,
    merged_adapter,
    restore_policy,
    save_policy,
)
from mtsql.learn.optimizer import make_optimizer, optimizer_state, restore_optimizer, stepped_parameters
from mtsql.learn.parallel import Processes, join_processes
from mtsql.model_folder import load_tokenizer
from mtsql.questions import (
    draw_questions,
    load_split,
    make_environment,
    make_sampling,
    reward_function,
    split_files,
)
from mtsql.recipes.rewards import RewardFunction
from mtsql.report.answer_log import AnswerLog
from mtsql.report.evaluation import answer_dialogues, score_records
from mtsql.report.metrics import HARDNESS, summarise
from mtsql.sql.score import Scorer, print_left_out, scorable

if TYPE_CHECKING:
    from peft import PeftModel

KEPT_CHECKPOINTS = 2
FREE_TO_CHANGE = ("out", "rows", "cache_gib", "concurrency", "latency_questions", "device")
# What a run that is resumed has to have in common with itself: its questions and prompts, their order, its
# start, the columns of its log, the state of its optimizer.
FIXED = (
    "model", "data", "tables", "databases", "held_out", "for_rl", "seed", "history", "drop_empty", "recipe",
    "tools", "ex", "beta2", "weight_decay",
    "curriculum", "level_size", "prompts_per_step", "questions", "targets", "teacher", "databases_per_step",
    "trajectories_per_step", "lora_rank", "rewards", "weights", "optimizer", "wording", "schema",
    "thinking", "native_thinking", "without", "sql_timeout", "error_hints", "max_prompt_tokens",
    "max_response_tokens", "max_sequence_tokens",
)  # fmt: skip
CHUNK = 16  # So many times --rows trajectories are sampled at a time, then handed to the caller.


def pick_device(name: str) -> torch.device:
    """The device of --device; `auto` is CUDA where there is a GPU.

    Of several GPUs it is the one that `join_processes` chose. Raises UserError for `cuda` without a GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no usable GPU; choose --device cpu")
    if name != "cuda":
        return torch.device(name)
    torch.set_float32_matmul_precision("high")  # TF32 for what stays float32: LoRA, its gradients
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape, and ours are many
    return torch.device(name, torch.cuda.current_device())


@dataclass(frozen=True)
class Questions:
    """The questions of a split, and the environment in which they are answered."""

    processes: Processes
    out: Path
    lock: FileLock | None  # of that folder, held by the main process
    tokens: ChatTokens
    dataset: Dataset
    environment: Environment
    scorer: Scorer  # over the environment's databases, sharing its executor and cache


@dataclass(frozen=True)
class ServedRun(Questions):
    """What an evaluation of a policy behind an address works with."""

    served: ServedPolicy


@dataclass(frozen=True)
class Run(Questions):
    """What every command that plays episodes works with."""

    policy: PreTrainedModel | PeftModel

    @property
    def attention(self) -> str:
        """The attention in use, which may be another than was asked for."""
        return self.policy.config._attn_implementation


def begin_questions(config: PolicyOptions, split: str, tokenizer: str) -> Questions:
    """The questions of a split, for a policy that has the tokenizer of this name."""
    processes = join_processes()
    tokens = ChatTokens(load_tokenizer(tokenizer), config.thinking)
    dataset = load_split(config, split)
    environment = make_environment(config, dataset, tokens, config.tools)
    scorer = Scorer(environment.schemas, environment.executor, config.ex)
    out = Path(config.out)
    lock = hold_folder(out) if processes.is_main and config.out else None
    return Questions(processes, out, lock, tokens, dataset, environment, scorer)


def begin_run(config: PolicyOptions, split: str, **how: Any) -> Run:
    """The policy of --model, loaded as `how` says, and the questions of a split that it is to answer."""
    questions = begin_questions(config, split, config.model)
    torch.manual_seed(config.seed)  # new LoRA adapters start at random
    policy = chosen_policy(config, questions.tokens, **how)
    if config.merge_adapter and not has_adapter(policy) and questions.processes.is_main:
        print("--merge-adapter does nothing here: the policy has no adapter")
    return Run(**vars(questions), policy=policy)


def chosen_policy(config: AgentOptions, tokens: ChatTokens, **how: Any) -> PreTrainedModel | PeftModel:
    """The policy of --model, as the options and `how` say. Raises UserError if it lacks ids of its tokens."""
    device = pick_device(config.device)
    options = {"dtype": config.dtype, "attention": config.attention, "quantise": config.quantise, **how}
    policy = load_policy(config.model, device=device, **options)
    ids, rows = len(tokens.tokenizer), policy.get_input_embeddings().weight.shape[0]
    if ids > rows:
        raise UserError(f"the tokenizer in {config.model} has {ids} ids, and its model embeddings for {rows}")
    return policy


def begin_answers(config: ServedOptions, split: str) -> Run | ServedRun:
    """The questions of a split and the policy that answers them: --model's, or the one at --address.

    Raises UserError unless one of the two is given, and for an address that is none or does not answer.
    """
    check_policy(config)
    for sentence in idle_policy(config):
        print(sentence)
    if config.model:
        return begin_run(config, split)
    questions = begin_questions(config, split, config.tokenizer)
    return ServedRun(**vars(questions), served=served_policy(config, questions.tokens))


def check_policy(config: ServedOptions | ChatConfig) -> None:
    """Raise UserError unless --model is given, or --address with what it needs."""
    if bool(config.model) == bool(config.address):
        raise UserError("give --model FOLDER, or --address URL with --api-model NAME")
    if config.address:
        check_address(config.address)
    if config.address and not (config.api_model and config.tokenizer):
        raise UserError("--address needs --api-model NAME and --tokenizer FOLDER")


def idle_policy(config: ServedOptions) -> list[str]:
    """A sentence for each option set in vain: of an address beside --model, or the other way round."""
    of_address = ("api_model", "protocol", "tokenizer", "concurrency", "own_temperature")
    of_model = ("dtype", "quantise", "attention", "merge_adapter", "rows", "cache_gib", "device")
    why, names = ("--model is here", of_address) if config.model else ("--address is the policy", of_model)
    return idle_options(config, dict.fromkeys(names, why))


def served_policy(config: AddressOptions, tokens: ChatTokens) -> ServedPolicy:
    """The policy at --address. Raises UserError if nothing answers there."""
    server = Server(config.address, read_key(), timeout=SECONDS)
    protocol = config.protocol
    if protocol == "auto":
        try:
            protocol = find_protocol(server, config.api_model, tokens)
        except ServerError as error:
            raise UserError(str(error)) from None
    print(f"{config.api_model} at {config.address}, protocol {protocol}")
    if protocol == "chat" and not tokens.thinking:
        print("--no-thinking does nothing over --protocol chat: the server writes the prompt; set it there")
    return ServedPolicy(server, config.api_model, protocol, tokens, config.own_temperature)


def training_questions(
    config: RewardOptions, run: Run, counted: Sequence[SuccessCount] = ()
) -> list[Example]:
    """The training questions in play: --questions of all, or of those in `counted`, drawn by the seed
    (0: all), less those that cannot be scored. They are drawn first, since the check executes every gold SQL.

    Each process executes all of them, to fill its cache; a gold SQL near --sql-timeout may be in time in one
    alone, and what one leaves out, all leave out.
    """
    asked, ids = examples(run.dataset.dialogues, config.history), {count.example_id for count in counted}
    asked = [e for e in asked if e.id in ids] if counted else asked
    if not asked:
        raise UserError("no question of the curriculum is in the training data")
    drawn = draw_questions(asked, config.questions, config.seed)
    kept = scorable(drawn, run.scorer, config.drop_empty)
    everywhere = set.intersection(*map(set, run.processes.all_gather([e.id for e in kept])))
    return [e for e in kept if e.id in everywhere]


def fitting_questions(config: RewardOptions, run: Run, asked: Sequence[Example]) -> list[Example]:
    """The questions whose prompt is not too long; says how many others there are.

    Raises UserError if there is none.
    """
    fits = [run.environment.episodes(e, [0])[0].trajectory.status is None for e in run.processes.share(asked)]
    kept = [e for e, fit in zip(asked, run.processes.gather(fits), strict=True) if fit]
    longer = f"longer than --max-prompt-tokens {config.max_prompt_tokens}"
    if not kept:
        raise UserError(f"the prompt of every question is {longer}")
    if run.processes.is_main:
        print_left_out(asked, kept, f"their prompt is {longer}")
    return kept


@dataclass(frozen=True)
class Training(Run):
    """What a training script works with; `step` and `state` are those of the checkpoint it resumes."""

    reward: RewardFunction
    reference: Reference | None  # the policy of --model, adapters of a warm start included
    optimizer: torch.optim.Optimizer
    step: int
    state: dict[str, Any] | None  # None at the beginning

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return stepped_parameters(self.optimizer)


def begin_training(config: SftConfig | GrpoConfig, weights: str = "", reference: bool = False) -> Training:
    """The training split and the policy: with --resume that of the newest checkpoint, else --model's.

    Raises UserError for options that do not go together, and if --out holds a run but --resume is not given.
    """
    if config.beta2 >= 1:
        raise UserError(f"--beta2 should be below 1, not {config.beta2:g}")
    if config.dtype == "float16":
        raise UserError("--dtype float16 is for evaluation; train in bfloat16 or float32")
    how = {"lora_rank": config.lora_rank, "gradient_checkpointing": config.gradient_checkpointing}
    if config.layout == "shared" and config.attention == "auto":
        how["attention"] = "sdpa"  # flash-attn has no kernel for this layout
    split = "rl" if config.for_rl and isinstance(config, GrpoConfig) else "train"
    run = begin_run(config, split, **how)
    if config.layout == "shared" and run.attention.startswith("flash"):
        raise UserError("--layout shared needs --attention sdpa; with flash-attn choose packed or rows")
    reward = reward_function(config, run.tokens, run.scorer, weights)
    found = find_checkpoint(run.out, config.resume) if run.processes.is_main else None
    if found is not None:
        for sentence in changed_options(config, run.out):
            print(sentence)
    checkpoint = run.processes.all_gather(found)[0]
    # Before a checkpoint's weights replace --model's.
    frozen = Reference(run.policy) if reference else None
    if checkpoint is not None:
        restore_policy(run.policy, checkpoint / "policy", config.dtype)
    optimizer = make_optimizer(
        run.policy, config.learning_rate, config.optimizer, config.beta2, config.weight_decay
    )
    step, state = 0, None
    if checkpoint is not None:
        step, state, moments = load_training_state(checkpoint)
        restore_optimizer(optimizer, moments)
    return Training(
        **vars(run),
        reward=reward,
        reference=frozen,
        optimizer=optimizer,
        step=step,
        state=state,
    )


def changed_options(config: TrainingOptions, out: Path) -> list[str]:
    """A sentence for each option in which this run differs from the one in `out` that it goes on from.

    Raises UserError if an option of FIXED is among them.
    """
    path = out / "run.json"
    try:
        before = dict(json.loads(path.read_bytes())["config"]) if path.is_file() else {}
    except (ValueError, LookupError, TypeError, RecursionError):
        return [f"{path} is damaged, so that nobody can say which options have changed; it is written anew"]
    now = json.loads(json.dumps(asdict(config)))
    changed = {n: (before[n], now[n]) for n in now if n in before and before[n] != now[n] and n != "resume"}
    sentences = [f"--{n.replace('_', '-')} was {old}, is now {new}" for n, (old, new) in changed.items()]
    levels = ("steps",) if before.get("curriculum") and before.get("level_size") else ()  # which share them
    fixed = [sentence for n, sentence in zip(changed, sentences, strict=True) if n in (*FIXED, *levels)]
    if fixed:
        raise UserError(f"{out} goes on with the same questions and policy only: {'; '.join(fixed)}")
    return sentences


def find_checkpoint(out: Path, resume: bool) -> Path | None:
    """The newest whole checkpoint of a run to go on from, None to start at the beginning.

    Raises UserError if there is one but --resume is not given.
    """
    newest = newest_checkpoint(out)
    if newest is not None and not resume:
        raise UserError(f"{out} holds a run's checkpoints; go on with --resume or take another --out")
    if newest is None and resume:
        print(f"{out} holds no checkpoint; starting at the beginning")
    return newest


def save_checkpoint(run: Training, step: int, state: dict[str, Any]) -> None:
    """Write the state of a training run after `step` steps."""
    if run.processes.is_main:
        with new_checkpoint(run.out, step, KEPT_CHECKPOINTS) as folder:
            save_policy(run.policy, run.tokens.tokenizer, folder / "policy")
            save_training_state(folder, optimizer_state(run.policy, run.optimizer), step, state)


def weights_for_rollouts(config: PolicyOptions, run: Run | ServedRun) -> AbstractContextManager[None]:
    """While the block runs, the adapter is part of the weights if --merge-adapter asks for it."""
    here = config.merge_adapter and not isinstance(run, ServedRun)
    return merged_adapter(run.policy) if here else nullcontext()


def save_result(run: Run, folder: Path) -> None:
    """Write the policy as an ordinary Hugging Face or adapter folder."""
    if run.processes.is_main:
        save_policy(run.policy, run.tokens.tokenizer, folder)


def load_dev(config: GrpoConfig, run: Run) -> Run:
    """The run with the first dialogues of another split, for evaluations during training.

    With --held-out it is `held_out`, else `dev`. Raises UserError where that would be what is trained on.
    """
    files = [source for source in config.data if Path(source).is_file()]
    if files and not config.held_out:
        raise UserError(
            f"--evaluate-every needs other questions than those trained on, and {files[0]} has one split; "
            "give --held-out, or --evaluate-every 0"
        )
    dataset = load_split(config, "held_out" if config.held_out else "dev")
    dataset = replace(dataset, dialogues=dataset.dialogues[: config.evaluate_dialogues or None])
    environment = make_environment(config, dataset, run.tokens, config.tools)
    scorer = Scorer(environment.schemas, environment.executor, config.ex)
    return replace(run, dataset=dataset, environment=environment, scorer=scorer)


def dev_scores(config: GrpoConfig, dev: Run) -> dict[str, float]:
    """EX, EM, and EX by hardness of greedy answers."""
    with weights_for_rollouts(config, dev):
        answered = answer_split(config, dev, dev.dataset.dialogues, 0.0, config.seed)
    scores = summarise(score_records(answered, dev.scorer, dev.environment.recipe.verifies))
    by_hardness = {f"ex_{level}": scores["ex"]["by_hardness"][level] for level in HARDNESS}
    return {"ex": scores["ex"]["mean"], "em": scores["em"]["mean"], **by_hardness}


def answer_options(config: ServedOptions, split: str, run: Run | ServedRun) -> dict[str, Any]:
    """What answers to `split` depend on: options, the files of policy and data, and how a server is asked.

    An interrupted evaluation goes on only if all of it is the same (`mtsql.report.answer_log`).
    """
    options = {name: value for name, value in asdict(config).items() if name not in FREE_TO_CHANGE}
    folder = Path(config.model)
    files = sorted(folder.glob("*")) if config.model and folder.is_dir() else []
    for index in range(len(config.data)):
        dialogues, tables, _ = split_files(config, split, index)
        files += [*dialogues, tables]
    asked = {dialogue.db_id for dialogue in run.dataset.dialogues}
    files += [run.dataset.schemas[name].path for name in sorted(asked)]
    versions = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    protocol = run.served.protocol if isinstance(run, ServedRun) else ""
    return options | {"protocol": protocol, "files of --model and --data": versions}


Progress: TypeAlias = Callable[[int, int, dict[str, float]], None]  # episodes done, of how many, figures


def make_player(
    config: PolicyOptions,
    run: Run | ServedRun,
    temperature: float,
    progress: Progress | None = None,
    rows: int = 0,
    top_p: float = 1.0,
) -> Callable[[Sequence[Episode]], object]:
    """The function that plays episodes to their ends with the policy, `rows` (0: --rows) at once.

    Behind an address --concurrency are played at once. Raises UserError if the server does not answer.
    """
    sampling = make_sampling(config, run.environment, temperature, top_p)

    def play_here(episodes: Sequence[Episode]) -> object:
        size = rows or config.rows
        return rollout(run.policy, run.tokens, episodes, sampling, size, progress, config.cache_gib)

    def play_there(episodes: Sequence[Episode]) -> object:
        refused, size = run.served.costs.refused, rows or config.concurrency
        try:
            return play_served(run.served, episodes, sampling, size, progress, skip_refused=True)
        except ServerError as error:
            raise UserError(f"{error}; what was answered is kept, and the same command goes on") from None
        finally:
            if found := run.served.costs.refused - refused:
                why = printable(run.served.costs.refusal)
                print(f"{found:,} episode(s) end without an answer, since the server refused theirs: {why}")

    return play_there if isinstance(run, ServedRun) else play_here


def answer_split(
    config: PolicyOptions,
    run: Run | ServedRun,
    dialogues: Sequence[Dialogue],
    temperature: float,
    seed: int,
    progress: Progress | None = None,
    log: AnswerLog | None = None,
    top_p: float = 1.0,
) -> list[tuple[Example, Trajectory]]:
    """One trajectory for each question of some dialogues, ordered by dialogue and turn.

    Each process plays its share; all get the whole. What `log` holds is not played again.
    """
    play = make_player(config, run, temperature, progress, top_p=top_p)
    share = run.processes.share(dialogues)
    answered = answer_dialogues(play, run.environment, share, config.history, seed, log)
    everything = [pair for share in run.processes.all_gather(answered) for pair in share]
    return sorted(everything, key=lambda pair: (pair[0].dialogue_id, pair[0].turn_index))


def check_samples(config: SftConfig | CurriculumConfig) -> None:
    """Raise UserError where the samples of a question would all be the same."""
    if config.samples_per_question > 1 and config.temperature <= 0:
        raise UserError("--temperature should be above 0: greedy samples of a question are all the same")


def sample_questions(
    config: SftConfig | CurriculumConfig,
    run: Run,
    numbered: Sequence[tuple[int, Example]],
    seed: tuple[int, ...],
    title: str,
) -> Iterator[tuple[Example, list[Trajectory]]]:
    """Each question with --samples-per-question trajectories, none if its prompt is too long.

    A trajectory's seed comes from `seed`, the question's number and the sample's. Questions come a chunk at
    a time, so that only what the caller keeps stays in memory.
    """
    sampling = make_sampling(config, run.environment, config.temperature)
    size = max(1, CHUNK * config.rows // config.samples_per_question)
    with tqdm(total=len(numbered), desc=title, unit="question", disable=not run.processes.is_main) as bar:
        for start in range(0, len(numbered), size):
            chunk, episodes = numbered[start : start + size], []
            for number, example in chunk:
                seeds = [trajectory_seed(*seed, number, i) for i in range(config.samples_per_question)]
                episodes += run.environment.episodes(example, seeds)
            episodes = [episode for episode in episodes if episode.trajectory.status is None]
            progress = show(bar, config.samples_per_question, start, len(numbered))
            played = rollout(
                run.policy, run.tokens, episodes, sampling, config.rows, progress, config.cache_gib
            )
            by_question = {name: list(group) for name, group in groupby(played, key=lambda t: t.example_id)}
            yield from ((example, by_question.get(example.id, [])) for _, example in chunk)
            bar.n = start + len(chunk)


def show(bar: tqdm, samples: int = 1, start: int = 0, questions: int = 0) -> Progress:
    """A rollout's `progress` that shows questions, tokens/s, use of the slots and interactions.

    A question has so many `samples`; `start` of all `questions` (0: the rollout's own) were done before.
    Of a server the requests are shown.
    """

    def progress(done: int, total: int, stats: dict[str, float]) -> None:
        bar.total, bar.n = questions or total, start + done // samples
        if "requests" in stats:
            bar.set_postfix_str(f"{stats['requests']} requests")
            return
        bar.set_postfix_str(
            f"{stats['tokens_per_second']:.0f} tokens/s, {stats['slots_in_use']:.0%} of slots in use, "
            f"{stats['interactions']:.1f} interactions"
        )

    return progress


def raise_not_finite(run: Run, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Save the trajectories of a micro-batch whose loss is NaN or infinite, and stop."""
    path = run.out / "not_finite.jsonl"
    lines = [json.dumps(trajectory_record(t, run.tokens.tokenizer.decode)) + "\n" for t in trajectories]
    write_atomically(path, "".join(lines))
    raise UserError(f"step {step}: the loss is not finite; its trajectories are in {path}")
