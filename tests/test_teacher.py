"""A teacher's trajectories are played again: what is kept of them, and what never enters."""

import json
from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest
from conftest import EXAMPLE, GOLD, QUESTION, TOY, Tiny, environment_of, json_lines, run, write_lines

from mtsql.agent.env import Limits
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Stop, Trajectory
from mtsql.data.datasets import examples, load_dataset
from mtsql.extras.served import message_text
from mtsql.extras.teacher import message_of, read_teacher, taught
from mtsql.learn.warm_start import Collected
from mtsql.recipes import RECIPES, load_recipe
from mtsql.recipes.mtsql_r1 import MtsqlR1, final_answer, tool_call, verdict
from mtsql.recipes.mtsql_r1_rewards import make_reward
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.report.records import chat_record

CALL = "Draft it.\n" + tool_call(EXEC_SQL, GOLD)
CHECKED = verdict(EXEC_SQL, True) + "\n"
MADE_UP = "<tool_response>\nthe teacher made this up\n</tool_response>\n"
NAMED = {"example_id": EXAMPLE.id}


class StoppingRecipe(MtsqlR1):
    """MTSQL-R1 if a call, or an observation that it makes up, ended its message."""

    stop_strings = ("</tool_response>", "</tool_call>")


def line_of(*messages: str | dict, **names: str) -> dict:
    """A line of a source, with an observation that nobody's database gave behind each message."""
    told = [{"role": "user", "content": f"Please help. {QUESTION}"}]
    for message in messages:
        given = {"content": message} if isinstance(message, str) else message
        told += [{"role": "assistant", **given}, {"role": "tool", "content": MADE_UP}]
    return {"messages": told, **names}


def found_in(tiny: Tiny, folder: Path, *lines: object, environment=None) -> list[Collected]:
    path = write_lines(folder / "teacher.jsonl", lines)
    reward = make_reward("", tiny.scorer, tiny.tokens.decode, 5)
    environment = environment or environment_of(tiny)
    return [taught(line, {EXAMPLE.id: EXAMPLE}, environment, reward) for line in read_teacher(path)]


def trajectory_in(*given, **how) -> Trajectory:
    ((trajectory,),) = (answer.kept for answer in found_in(*given, **how))
    return trajectory


def test_only_the_teachers_words_are_learned_and_observations_are_ours(tiny, tmp_path):
    made_up = [CALL + "\n" + MADE_UP + CHECKED + final_answer("SELECT 1"), CHECKED + final_answer(GOLD)]
    trajectory = trajectory_in(tiny, tmp_path, line_of(*made_up, **NAMED))
    seen = tiny.tokens.tokenizer.decode(trajectory.ids)
    assert "made this up" not in seen and "Please help" not in seen
    assert "<tool_response>\nBruno\n</tool_response>" in seen
    learned = [i for i, bit in zip(trajectory.ids, trajectory.loss_mask, strict=True) if bit]
    words = [CALL, CHECKED + final_answer(GOLD)]
    assert learned == [i for text in words for i in tiny.tokens.message_ids(text)]


def test_a_message_of_weight_0_is_played_but_not_learned(tiny, tmp_path):
    mistake = {"content": "Draft it.\n" + tool_call(EXEC_SQL, "SELECT nme FROM singer")}
    right = [verdict(EXEC_SQL, False) + "\n" + tool_call(EXEC_SQL, GOLD), CHECKED + final_answer(GOLD)]
    lines = [line_of(mistake | how, *right, **NAMED) for how in ({}, {"weight": 0})]
    plain, marked = (trajectory_in(tiny, tmp_path, line) for line in lines)
    assert marked.ids == plain.ids and len(marked.observations) == 2
    first = plain.segments[1]
    assert marked.segments[1] == replace(first, loss_mask=(0,) * len(first.ids))
    assert marked.segments[2:] == plain.segments[2:] and sum(marked.loss_mask) > 0
    again = trajectory_in(tiny, tmp_path, chat_record(marked, EXAMPLE, environment_of(tiny)))
    assert again.segments == marked.segments


def test_a_message_ends_behind_its_action_or_a_stop_string(tiny):
    recipe, answer = MtsqlR1(PromptOptions(True, 40)), final_answer(GOLD)
    draft, thought = final_answer("SELECT 1"), "<think>" + CALL + "</think>"
    for text, kept in (
        (CALL + MADE_UP + answer, CALL),  # a call counts before an answer
        (draft + " or " + CALL + " wait", draft + " or " + CALL),
        (draft + " no, " + answer + " Done.", draft + " no, " + answer),  # the last answer counts
        (thought + answer + "\n", thought + answer),
        ("no action </b> at all", "no action </b> at all"),
        ("a <b> and </i> " + CALL + CALL, "a <b> and </i> " + CALL),  # no pairs
    ):
        assert message_of(text, recipe)[0] == kept
    stopping = StoppingRecipe(PromptOptions(True, 40))
    assert message_of(thought + answer, stopping) == ("<think>" + CALL, Stop.STOP_STRING)


@pytest.mark.parametrize("piece", ["<think>", "</tool_call>", "<b></i>"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_message_of_many_tags_takes_no_square_time(name, piece):
    recipe = load_recipe(name).make_recipe(PromptOptions())
    closing, action = 240_000 // len(piece) * piece + "</think>", recipe.call("SELECT 1")
    begun = process_time()
    assert message_of(f"{closing}{action} Done.", recipe)[0] == closing + action
    message_of(f"{recipe.answer('SELECT 1')}{closing}", recipe)
    assert process_time() - begun < 2  # square time is a minute and more


def test_after_a_stop_string_the_end_of_turn_is_the_environments(tiny, tmp_path):
    environment = replace(environment_of(tiny), recipe=StoppingRecipe(PromptOptions(True, 40)))
    line = line_of(CALL + MADE_UP, CHECKED + final_answer(GOLD), **NAMED)
    call, observation, answer = trajectory_in(tiny, tmp_path, line, environment=environment).segments[1:]
    ends = tiny.tokens.end_of_turn_ids
    assert call.ids[-1] not in ends and answer.ids[-1] in ends and all(call.loss_mask + answer.loss_mask)
    assert tiny.tokens.decode(call.ids) == CALL
    assert observation.ids[0] in ends and not any(observation.loss_mask)


def test_what_is_dropped_is_counted_with_its_reason(tiny, tmp_path):
    right, name = (CALL, CHECKED + final_answer(GOLD)), NAMED
    wrong = (tool_call(EXEC_SQL, "SELECT 1"), CHECKED + final_answer("SELECT 1"))
    given = [{"name": EXEC_SQL, "arguments": code} for code in ({"code": GOLD}, json.dumps({"code": GOLD}))]
    calls = [{"tool_calls": [call]} for call in (given[0], {"function": given[1]})]
    pieces = {"content": [{"type": "text", "text": right[1]}]}
    lines = {
        None: [line_of(*right, "Anything else?", **name), *(line_of(call, pieces, **name) for call in calls)],
        "wrong_ex": [line_of(*wrong, **name)], "out_of_interactions": [line_of(*[CALL] * 5, **name)],
        "malformed_call": [line_of("<tool_call>{</tool_call>", **name)],
        # Without a verdict, without a call.
        "off_protocol": [line_of(CALL, final_answer(GOLD), **name), line_of(final_answer(GOLD), **name)],
        "no_action": [
            line_of("I cannot do that.", **name), line_of(CALL, **name),
            line_of("<|im_end|>\n<|im_start|>user\nNow this: " + CALL, right[1], **name),
        ],
        "out_of_tokens": [line_of("Hm. " * 500 + CALL, right[1], **name)],
        "unknown_question": [
            {"messages": [{"role": "user", "content": "Who?"}, *line_of(*right)["messages"]]},
            line_of(*right, db_id="music"),
            line_of(*right, **name, db_id="concerts"),  # of another file
            line_of(*right, example_id="00000/2", db_id="music"),  # not in play
        ],
        "unreadable": [
            "no object", [], {"messages": 3}, line_of({"content": 3}), line_of("\ud800", **name),
            {"messages": [{"role": "user", "content": "Without an answer."}]},
            line_of({"tool_calls": [{"name": EXEC_SQL, "arguments": "{"}]}),
            line_of(*right, **name, tool_set="all"),
        ],
        "nothing_learned": [line_of(*({"content": text, "weight": 0} for text in right), **name)],
    }  # fmt: skip
    environment = environment_of(tiny, limits=Limits(max_turn_tokens=300, max_interactions=3))
    for reason, group in lines.items():
        of_lines = found_in(tiny, tmp_path, *group, environment=environment)
        assert len(of_lines) == len(group)
        for found in of_lines:
            assert (bool(found.kept), [*found.rejected]) == (reason is None, [reason] if reason else [])


def test_calls_and_thoughts_that_stand_apart_are_part_of_the_text(tmp_path):
    call = {"name": EXEC_SQL, "arguments": json.dumps({"code": GOLD})}
    pieces = [{"type": "thinking", "thinking": "Done."}, {"type": "text", "text": final_answer(GOLD)}]
    calls = {"tool_calls": [{"id": "1", "type": "function", "function": call}]}
    said = {"content": None, "reasoning_content": "Draft.", **calls}
    (read,) = read_teacher(write_lines(tmp_path / "line.jsonl", [line_of(said, {"content": pieces})]))
    for thought in ({"thinking": "Done."}, {"content": [{"type": "reasoning", "text": "Done."}]}):
        assert message_text({"role": "assistant", **thought}).rstrip() == "<think>\nDone.\n</think>"
    both = ("Draft.", tool_call(EXEC_SQL, GOLD)), ("Done.", final_answer(GOLD))
    assert read.messages == [(f"<think>\n{thought}\n</think>\n\n{text}", True) for thought, text in both]


def test_train_sft_learns_from_a_teachers_file(work, tmp_path):
    data = work / "benchmark"
    asked = examples(load_dataset([(data / "train.json", data / "tables.json", data / "database")]).dialogues)
    lines = [line_of("I give up.", example_id=asked[4].id, db_id=asked[4].db_id)]
    for question in asked[:4]:
        memory = tool_call(MEMORY_RETRIEVE, question.gold_sql)
        checked = [CHECKED + memory, verdict(MEMORY_RETRIEVE, True)] if question.history else [CHECKED]
        said = [tool_call(EXEC_SQL, question.gold_sql), *checked]
        said[-1] += final_answer(question.gold_sql)
        lines.append(line_of(*said, example_id=question.id, db_id=question.db_id))
    teacher, out = write_lines(tmp_path / "teacher.jsonl", lines), tmp_path / "out"
    taught = ["train_sft.py", *TOY, "--data", data, "--model", "models/toy/seed0"]
    taught += ["--questions", 0, "--epochs", 1, "--targets"]
    printed = run(*taught, teacher, "--out", out)
    assert {t["example_id"] for t in json_lines(out / "trajectories.jsonl")} == {q.id for q in asked[:4]}
    (coverage,) = json.loads((out / "coverage.json").read_text())
    assert (coverage["sampled"], coverage["right"], coverage["trajectories"]) == (5, 4, 4)
    assert "rollouts not kept: no_action 1\n" in printed and (out / "policy").is_dir()

    teacher.write_text("nothing\n")
    for words, problem in (
        ([*taught, teacher, "--rounds", 2], "needs --rounds 1"),
        ([*taught, tmp_path / "nowhere.jsonl"], "nowhere.jsonl should be self, gold or a JSONL file"),
        ([*taught, teacher], "can be kept: the counts above say why"),
    ):
        assert problem in run(*words, "--out", tmp_path / "none", expect=2)
