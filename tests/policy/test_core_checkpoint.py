"""Checkpoints of a TriEncoder: round trips, every kind of damage, fingerprints, interrupted saves."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import saved_model
import torch
from safetensors.torch import load_file, save_file
from tiny_bert import tiny_bert
from toys import reseal

from langchain_rcr.basics.items import Item
from langchain_rcr.errors import CheckpointError, InputError
from langchain_rcr.families import families, get_family
from langchain_rcr.policy import checkpoint as policy
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

torch.set_num_threads(1)

ITEMS = [
    Item(f"what is the {word} of {state}", f"answer({word}({state}))")
    for word in ("capital", "area", "river")
    for state in ("texas", "ohio")
]
FAMILIES = [family.name for family in families()]
LATER = policy.FORMAT_VERSION + 1
QUERIES = ["what is the area of texas", "how long is the river", "unheard of"]


def make(family, bert, seed=0, **options):
    torch.manual_seed(seed)
    if family == "embeddings":
        options = {"base": bert, "ngram_init": 0.5, **options}
    elif family == "transformer" or family == "structure":
        options = {"base": bert, **options}
    else:
        options = {"dim": 12, **options}
    model = TriEncoder.build(family, ITEMS, seed=seed, lam=0.3, tau=0.7, **options)
    if family == "structure":
        model.query.learn(ITEMS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape))
    return model.eval()


def encoder_file(checkpoint, part, name):
    return checkpoint / f"{part}_encoder" / name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, bert):
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        make(family, bert).save_pretrained(folder / family)
    return folder


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


@pytest.fixture
def checkpoint(family, checkpoints, tmp_path):
    return Path(shutil.copytree(checkpoints / family, tmp_path / "checkpoint"))


def refused(folder, *words, sealed=False):
    """Loading fails with one line that holds the words and the folder's name.

    Unless `sealed`, it fails by the digests, and with these words where the digests are those of the changed files.
    """
    for attempt in ("changed", "sealed")[sealed:]:
        with pytest.raises(CheckpointError) as error:
            TriEncoder.from_pretrained(folder)
        text = str(error.value)
        assert "\n" not in text
        assert folder.name in text
        if attempt == "changed":
            reseal(folder)
    for word in words:
        assert word in text, text
    return text


def test_loaded_as_it_was_saved(family, bert, checkpoint):
    model, again = make(family, bert), TriEncoder.from_pretrained(checkpoint, runtime="torch")
    assert again.fingerprint() == model.fingerprint()
    assert (again.config, again.spec, again.dim) == (model.config, model.spec, model.dim)
    assert again.family is get_family(family)
    assert (again.config.lam, again.config.tau) == (0.3, 0.7)
    assert not again.training
    queries, pool = again.encode_queries(QUERIES), again.encode_pool(ITEMS)
    np.testing.assert_array_equal(queries, model.encode_queries(QUERIES))
    np.testing.assert_array_equal(pool.candidate, model.encode_pool(ITEMS).candidate)
    np.testing.assert_array_equal(pool.context, model.encode_pool(ITEMS).context)
    picks = greedy(queries, pool, again.state(), 4)
    expected = greedy(model.encode_queries(QUERIES), model.encode_pool(ITEMS), model.state(), 4)
    np.testing.assert_array_equal(picks.positions, expected.positions)


def test_a_runtime_that_is_none_is_refused(checkpoint, tmp_path):
    model = TriEncoder.from_pretrained(checkpoint)
    with pytest.raises(InputError, match="runtime: unknown 'onnx-int4'; did you mean 'onnx-int8'"):
        model.save_pretrained(tmp_path / "again", runtime="onnx-int4")
    assert not (tmp_path / "again").exists()
    with pytest.raises(InputError, match="runtime: unknown 'cuda'"):
        TriEncoder.from_pretrained(checkpoint, runtime="cuda")


def test_the_same_model_writes_the_same_bytes(family, bert, tmp_path, checkpoint):
    TriEncoder.from_pretrained(checkpoint, runtime="torch").save_pretrained(tmp_path / "again")
    ours, theirs = (
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (checkpoint, tmp_path / "again")
    )
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_only_safetensors_and_json(checkpoint):
    assert {file.suffix for file in checkpoint.rglob("*") if file.is_file()} == {".json", ".safetensors", ".md"}


@pytest.mark.slow
def test_a_transformer_checkpoint_needs_no_other_file(bert, tmp_path):
    base = shutil.copytree(bert, tmp_path / "model")
    for family in ("transformer", "embeddings"):
        model = make(family, str(base))
        model.save_pretrained(tmp_path / family)
    shutil.rmtree(base)
    for family in ("transformer", "embeddings"):
        shutil.move(tmp_path / family, tmp_path / f"{family} elsewhere")
        TriEncoder.from_pretrained(tmp_path / f"{family} elsewhere")


def test_every_missing_file_is_named(checkpoint):
    for file in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != "README.md"):
        content = file.read_bytes()
        file.unlink()
        refused(checkpoint, "is not a complete checkpoint", f"{file.relative_to(checkpoint)} is missing", sealed=True)
        file.write_bytes(content)
    TriEncoder.from_pretrained(checkpoint)


@pytest.mark.parametrize("part", ["query_encoder", "context_encoder", "candidate_encoder"])
def test_a_missing_encoder_is_named(checkpoint, part):
    shutil.rmtree(checkpoint / part)
    refused(checkpoint, part)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "foreign", "folder"])
def test_damaged_weights_are_named(checkpoint, damage):
    file = encoder_file(checkpoint, "context", "model.safetensors")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "text":
        file.write_text("version https://git-lfs.github.com/spec/v1\n" * 5)
    elif damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        save_file({"x": torch.zeros(3)}, file, metadata={"format": "pt"})
    # A transformer opens with foreign weights (Hugging Face fills in what lacks); the fingerprint tells.
    refused(checkpoint, *([] if damage == "foreign" else ["context_encoder"]))


def test_one_changed_weight_is_noticed(checkpoint):
    file = encoder_file(checkpoint, "query", "model.safetensors")
    tensors = load_file(file)
    name = max(tensors, key=lambda key: tensors[key].numel())
    tensors[name].view(-1)[-1] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    refused(checkpoint, "the weights are not those that tri_encoder.json was written for")


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}", '{"dim": 3}', "[" * 100_000, "\udc80"])
def test_foreign_json_is_named(checkpoint, text):
    for file in (checkpoint / "tri_encoder.json", encoder_file(checkpoint, "context", "encoder.json")):
        before = file.read_bytes()
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        refused(checkpoint, file.name)
        file.write_bytes(before)
        reseal(checkpoint)


CHANGES = {
    "all": [{"vocabulary": "0"}, {"unheard_of": 1}],
    "lexical": [
        {"scale": "loud"},
        {"scale": 0.5},
        {"dim": "x"},
        {"dim": -3},
        {"dim": None},
        {"dim": 10**5},
        {"dim": 10**15},
        {"dim": 10**30},
        {"dim": 7},
    ],
    "embeddings": [
        {"dim": "x"},
        {"dim": -3},
        {"dim": 10**5},
        {"dim": 10**15},
        {"dim": 10**30},
        {"dim": 7},
        {"queries": True},
        {"vocabulary": None},
    ],
    "transformer": [{"pooling": "cls"}, {"max_length": 7}, {"max_length": "x"}, {"normalize": True}],
    "structure": [
        {"scale": "loud"},
        {"scale": 0.5},
        {"role": "need"},
        {"role": 3},
        {"context": True},
        {"inventory": "0"},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "change"), [(family, change) for family in FAMILIES for change in CHANGES["all"] + CHANGES[family]]
)
def test_changed_settings_of_an_encoder_are_noticed(checkpoint, change):
    file = encoder_file(checkpoint, "candidate", "encoder.json")
    config = json.loads(file.read_text()) | change
    if "unheard_of" in change:
        config.pop("scale", None)  # renamed in another version, say
    file.write_text(json.dumps(config))
    refused(checkpoint)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": LATER}, (f"format {LATER}", "upgrade langchain-rcr")),
        ({"format_version": LATER, "versions": {"langchain-rcr": "9.1"}}, ("written by langchain-rcr 9.1",)),
        ({"format_version": LATER, "versions": ["x"]}, (f"format {LATER}",)),
        ({"format_version": LATER, "lam": ...}, (f"format {LATER}",)),
        ({"format_version": 4}, ("format 4", f"reads format {LATER - 1}: train it again")),
        ({"format_version": "1"}, ("format 1",)),
        ({"format_version": None}, ("format None",)),
        ({"family": "weather"}, ("unknown encoder family 'weather'", "entry-point group 'langchain_rcr.families'")),
        ({"family": "os:getcwd"}, ("unknown encoder family 'os:getcwd'",)),
        ({"settings": ["x"]}, ("damaged",)),
        ({"settings": {"dim": "x"}}, ("damaged",)),
        ({"settings": {"unheard": 1}}, ("damaged",)),
        ({"spec": {"unheard": 1}}, ("unheard",)),
        ({"spec": {"language": "klingon"}}, ("klingon",)),
        ({"spec": {"max_size": 3}}, ("not those",)),
        ({"family": ["lexical"]}, ("unknown encoder family",)),
        ({"state": "sticky"}, ("unknown state 'sticky'",)),
        ({"state": "saturating"}, ("contradicts",)),
        ({"lam": "x"}, ("damaged",)),
        ({"lam": 0.4}, ("not those",)),
        ({"tau": None}, ("damaged",)),
        ({"fingerprint": None}, ("not those",)),
    ],
)
def test_a_changed_tri_encoder_json(checkpoints, tmp_path, change, words):
    folder = Path(shutil.copytree(checkpoints / "lexical", tmp_path / "checkpoint"))
    file = folder / "tri_encoder.json"
    meta = json.loads(file.read_text()) | change
    file.write_text(json.dumps({name: value for name, value in meta.items() if value is not ...}))
    refused(folder, *words)


@pytest.mark.slow
def test_files_of_two_checkpoints_do_not_mix(family, bert, checkpoint, tmp_path):
    make(family, bert, seed=1).save_pretrained(tmp_path / "other")
    weights = encoder_file(checkpoint, "query", "model.safetensors").relative_to(checkpoint).as_posix()
    for name in ("tri_encoder.json", weights, "context_encoder", "candidate_encoder"):
        mixed = Path(shutil.copytree(checkpoint, tmp_path / f"mixed {name.replace('/', ' ')}"))
        if (tmp_path / "other" / name).is_dir():
            shutil.rmtree(mixed / name)
            shutil.copytree(tmp_path / "other" / name, mixed / name)
        else:
            shutil.copy(tmp_path / "other" / name, mixed / name)
        refused(mixed, "files of two checkpoints?")


def test_encoders_do_not_change_places(family, checkpoint):
    (checkpoint / "context_encoder").rename(checkpoint / "x")
    (checkpoint / "candidate_encoder").rename(checkpoint / "context_encoder")
    (checkpoint / "x").rename(checkpoint / "candidate_encoder")
    refused(checkpoint, "files of two checkpoints?")


@pytest.mark.parametrize("family", ["lexical", "embeddings"])
def test_a_vocabulary_of_the_same_size_is_another_vocabulary(checkpoint):
    file = encoder_file(checkpoint, "candidate", "vocabulary.json")
    value = json.loads(file.read_text())
    first, *rest = value["idf"]
    value["idf"] = {f"{first}x": value["idf"][first]} | {name: value["idf"][name] for name in rest}
    file.write_text(json.dumps(value))
    refused(checkpoint, "vocabulary.json")


def test_the_backbone_of_another_checkpoint_is_noticed(checkpoints, bert, tmp_path):
    other = tiny_bert(tmp_path / "other", seed=5)
    folder = Path(shutil.copytree(checkpoints / "embeddings", tmp_path / "checkpoint"))
    shutil.copy(Path(other) / "model.safetensors", folder / "backbone" / "model.safetensors")
    refused(folder, "another embedding model")


def test_what_is_no_checkpoint_folder(tmp_path, checkpoints):
    assert "no such folder" in refused(tmp_path / "missing", sealed=True)
    (tmp_path / "file").touch()
    assert "a file, not a folder" in refused(tmp_path / "file", sealed=True)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "tri_encoder.json is missing", sealed=True)
    refused(checkpoints / "lexical" / "query_encoder", "tri_encoder.json is missing", sealed=True)


# ---------------------------------------------------------------- saving


@pytest.mark.slow
def test_an_interrupted_save_keeps_the_good_checkpoint(family, bert, checkpoint, monkeypatch):
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    other = make(family, bert, seed=1)
    monkeypatch.setattr(policy, "library_versions", lambda: 1 / 0)  # just before the last file is written
    with pytest.raises(ZeroDivisionError):
        other.save_pretrained(checkpoint)
    assert {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before
    assert [path.name for path in checkpoint.parent.iterdir() if path.name.startswith(".")] == []
    monkeypatch.undo()
    other.save_pretrained(checkpoint)
    assert TriEncoder.from_pretrained(checkpoint).fingerprint() == other.fingerprint()


def test_a_save_spares_what_is_no_checkpoint(tmp_path, checkpoints):
    model = TriEncoder.from_pretrained(checkpoints / "lexical")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="which isn't a checkpoint's and would be lost: give a new folder"):
        model.save_pretrained(tmp_path / "home")
    with pytest.raises(InputError, match="is a file"):
        model.save_pretrained(tmp_path / "home" / "thesis.tex")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(InputError, match="is a mount point, which can't be replaced as a whole: give a folder inside"):
        model.save_pretrained("/")  # as is a container's volume
    (tmp_path / "empty").mkdir()
    model.save_pretrained(tmp_path / "empty")
    TriEncoder.from_pretrained(tmp_path / "empty")


def test_numbers_of_any_kind_survive(tmp_path):
    model = TriEncoder.build("lexical", ITEMS, dim=4, lam=1, tau=np.float32(0.25), scale=20)
    model.save_pretrained(tmp_path / "c")
    config = TriEncoder.from_pretrained(tmp_path / "c").config
    assert (config.lam, config.tau, config.scale) == (1.0, 0.25, 20.0)


def test_texts_in_any_script_survive(tmp_path):
    items = [
        Item("größe von münchen", "antwort(größe(münchen))"),
        Item("人口は？", "人口(東京)"),
        Item("🙂", "f('🙂')"),
    ]
    model = TriEncoder.build("lexical", items, dim=4)
    model.save_pretrained(tmp_path / "c")
    again = TriEncoder.from_pretrained(tmp_path / "c", runtime="torch")
    np.testing.assert_array_equal(again.encode_pool(items).candidate, model.encode_pool(items).candidate)


def test_a_pool_without_words(tmp_path):
    model = TriEncoder.build("lexical", [Item(" ")], dim=4)
    model.save_pretrained(tmp_path / "c")
    assert TriEncoder.from_pretrained(tmp_path / "c").encode_queries(["x"]).tolist() == [[0.0] * 4]


# ---------------------------------------------------------------- fingerprints


@pytest.mark.slow
def test_fingerprints_tell_policies_apart(family, bert):
    model = make(family, bert)
    found = {"as it is": model.fingerprint()}
    assert make(family, bert).fingerprint() == found["as it is"]
    for part in ("query", "context", "candidate"):
        with torch.no_grad():
            next(iter(getattr(model, part).parameters())).view(-1)[0].add_(1e-4)
        found[f"{part} weight"] = model.fingerprint()
        if family == "transformer":
            getattr(model, part).normalize = True
        else:
            getattr(model, part).scale *= 2
        found[f"{part} setting"] = model.fingerprint()
    model.config = model.config.model_copy(update={"lam": 0.31})
    found["λ"] = model.fingerprint()
    model.config = model.config.model_copy(update={"fade": 2.5})
    found["p"] = model.fingerprint()
    model.spec = ProgramSpec(max_size=2)
    found["spec"] = model.fingerprint()
    assert len(set(found.values())) == len(found)
    model.config = model.config.model_copy(update={"tau": 9.0, "order": "picked"})
    assert model.fingerprint() == found["spec"]  # neither changes a vector


# ---------------------------------------------------------------- what is saved means the same in later versions


def test_a_checkpoint_that_was_saved_earlier_predicts_and_picks_as_it_did():
    expected = json.loads(saved_model.EXPECTED.read_text())
    now = saved_model.predicted(saved_model.read())
    assert now["picks"] == expected["picks"]
    for part in ("vectors", "with a draft"):
        np.testing.assert_allclose(now[part], expected[part], atol=1e-3, rtol=1e-3)
