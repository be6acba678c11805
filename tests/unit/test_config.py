"""Configuration files: what is read, and what an error says."""

from pathlib import Path

import pytest

from shell_router.app import load_config
from shell_router.config import ApiKey, Config, PairSettings, read_keys
from shell_router.config.models import ServerLaunch, ServerSettings
from shell_router.errors import ConfigError
from shell_router.standins.embedded.settings import EmbeddedSection

ROOT = Path(__file__).parents[2]
MODELS = "models: {small: {path: m}}\n"
PAIR = "pairs: [{prefill: 'http://a', decode: 'http://b'}]"
LAUNCHED = PAIR.replace("}]", ", launch: {}}]")


def _load(folder: Path, text: str, **environ: str) -> Config:
    file = folder / "router.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, environ)


def _error(folder: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load(folder, text)
    return caught.value


def test_a_minimal_file_gets_defaults_for_everything_else(tmp_path: Path) -> None:
    config = _load(tmp_path, MODELS)
    assert config.models["small"].path == tmp_path / "m"
    assert config.listen.port == 8000
    assert config.listen.loopback
    assert config.cache.backend == "memory"


def test_every_section_is_read(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        """
listen: {host: "::1", port: 0}
models:
  a: {path: a, embedded: {device: cuda, dtype: bfloat16, threads: 2}, context_length: 4096}
  b: {path: /b, pairs: [{prefill: "http://p:1", decode: "http://d:2", bootstrap_port: 9, bootstrap_host: h}]}
  c: {path: c, servers: ["http://s:1", {server: "http://s:2", launch: {}}]}
limits: {drain_s: 3}
""",
    )
    assert config.models["c"].sglang == (
        ServerSettings("http://s:1"),
        ServerSettings("http://s:2", ServerLaunch()),
    )
    assert config.models["a"].engine == {
        "embedded": EmbeddedSection(device="cuda", dtype="bfloat16", threads=2)
    }
    assert config.models["a"].context_length == 4096
    assert config.models["b"].pairs == (PairSettings("http://p:1", "http://d:2", 9, "h"),)
    assert config.limits.drain_s == 3.0


@pytest.mark.parametrize("engine", ["embedded: ", f"embedded: null, {PAIR}"])
def test_an_engine_kind_without_settings_is_as_if_it_were_left_out(
    tmp_path: Path, engine: str
) -> None:
    assert _load(tmp_path, f"models: {{a: {{path: a, {engine}}}}}\n").models["a"].engine == {}


def test_how_requests_are_scheduled_is_read_with_the_scorers_weights(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        MODELS
        + """
scheduling:
  selection: {policy: scored, weights: {wait: 2, affinity: 0.5}, gimbal: {theta_kv: 0.8}}
  queue: {order: shortest_prefill, bind: arrival, max_running: 32}
  poll_s: 0.5
""",
    )
    selection, queue = config.scheduling.selection, config.scheduling.queue
    assert (selection.policy, selection.gimbal.theta_kv) == ("scored", 0.8)
    assert selection.weights == {"wait": 2.0, "affinity": 0.5}
    assert (queue.order, queue.bind, queue.max_running, queue.age_s) == (
        "shortest_prefill",
        "arrival",
        32,
        5.0,
    )


@pytest.mark.parametrize(
    ("scheduling", "words"),
    [
        ("{selection: {policy: best}}", "scheduling.selection.policy must be 'least_running' or "),
        ("{selection: {weights: {luck: 1}}}", "weights.luck must be 'wait' or "),
        ("{queue: {order: luck}}", "scheduling.queue.order must be 'fcfs' or "),
        ("{poll_s: 9}", "poll_s must be below 5, not 9"),
    ],
)
def test_a_policy_that_does_not_exist_is_refused_with_those_that_do(
    tmp_path: Path, scheduling: str, words: str
) -> None:
    error = str(_error(tmp_path, MODELS + f"scheduling: {scheduling}\n"))
    assert error.startswith(f"{tmp_path / 'router.yaml'}:2: ")
    assert words in error


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        "models: {a: {path: weights/a}}\ntopologies: [trees, /other]\nbatches: {folder: kept}\n",
    )
    assert config.batches.folder == tmp_path / "kept"
    assert config.models["a"].path == tmp_path / "weights" / "a"
    assert config.topologies == (tmp_path / "trees", Path("/other"))


def test_keys_come_from_the_file_or_the_environment(tmp_path: Path) -> None:
    config = _load(
        tmp_path, MODELS + "api_keys: {alice: {env: ALICE}, bob: secret}\n", ALICE="from-there"
    )
    assert config.api_keys == {"alice": ApiKey(key="from-there"), "bob": ApiKey(key="secret")}


def test_an_unset_key_variable_is_an_error_that_names_it(tmp_path: Path) -> None:
    error = _error(tmp_path, MODELS + "api_keys: {alice: {env: ALICE}}\n")
    assert str(error).startswith(f"{tmp_path / 'router.yaml'}:2: the API key of 'alice' is empty")
    assert "ALICE" in error.remedy


def test_two_tenants_cannot_share_a_key(tmp_path: Path) -> None:
    error = _error(tmp_path, MODELS + "api_keys: {alice: same, bob: same}\n")
    assert "'alice' and 'bob'" in str(error)
    assert "same" not in str(error).replace("the same", "")


def test_a_file_of_keys_adds_to_the_deployments_own_and_is_read_anew(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("api_keys:\n  bob: {env: BOB, models: [small], expires: '2027-01-31'}\n")
    config = _load(
        tmp_path,
        MODELS + "listen: {host: 0.0.0.0}\napi_keys: {alice: k}\napi_keys_file: keys.yaml\n",
    )
    bob = ApiKey(key="from-there", models=("small",), expires="2027-01-31")
    assert read_keys(config, {"BOB": "from-there"}) == {"alice": ApiKey(key="k"), "bob": bob}
    keys.write_text("api_keys: {bob: other}\n")
    assert read_keys(config, {})["bob"] == ApiKey(key="other")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("api_keys: {}\n", "api_keys is empty"),
        ("", "The file is empty"),
        ("api_keys: {alice: x}\n", "has ['alice'] already"),
        (
            "api_keys: {bob: {env: NO_SUCH_VARIABLE}}\n",
            "keys.yaml:1: the API key of 'bob' is empty",
        ),
        ("api_keys: {bob: {}}\n", "either `key` or `env`"),
        ("api_keys: {bob: {key: a, env: B}}\n", "either `key` or `env`"),
        ("api_keys: {bob: {key: a, expires: soon}}\n", "'soon', which is no time"),
        ("api_keys: {bob: {key: a, route: [/x]}}\n", "Did you mean 'routes'?"),
        ("api_keys: {bob: {key: a, tokens_per_minute: 0}}\n", "at least 1"),
        ('api_keys: {bob: "\\ud800x"}\n', "keys.yaml:1: This text is not valid Unicode"),
        ("api_keys: {bob: x, carol: x}\n", "'bob' and 'carol' have the same API key"),
    ],
)
def test_a_wrong_file_of_keys_is_refused_with_its_name(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    config = _load(tmp_path, MODELS + "api_keys: {alice: k}\napi_keys_file: keys.yaml\n")
    with pytest.raises(ConfigError, match=r"keys\.yaml") as caught:
        read_keys(config, {})
    assert words in str(caught.value)


SECRETS = [
    (
        "cache: {url: 'redis//:SECRET@h'}\n",
        "cache.url must be a redis://, rediss:// or unix:// URL, not this text.",
    ),
    (
        "cache: {url: 'redis://:SECRET@h/0?protocol=3'}\n",
        "url sets protocol. Leave it out: the router needs its own.",
    ),
    (
        "cache: {password: 8271}\n",
        "cache.password must be text or a mapping, not a number. Put it in quotes.",
    ),
    ("cache: {password: 8271-01-01}\n", "read as a YAML timestamp"),
    (
        "api_keys: {alice: 8271}\n",
        "api_keys.alice must be text or a mapping, not a number. Put it in quotes.",
    ),
    (
        "api_keys: {alice: {key: 8271}}\n",
        "api_keys.alice.key must be text, not a number. Put it in quotes.",
    ),
    ("api_keys: SECRET\n", "api_keys must be a mapping, not this text."),
    (
        f"models: {{small: {{path: m, engine_key: 8271, {PAIR}}}}}\n",
        "small.engine_key must be text or a mapping",
    ),
]


@pytest.mark.parametrize(("text", "words"), SECRETS)
def test_errors_show_no_secret(tmp_path: Path, text: str, words: str) -> None:
    error = str(_error(tmp_path, text if text.startswith("models") else MODELS + text)).replace(
        str(tmp_path), ""
    )
    assert words in error
    assert "SECRET" not in error and "8271" not in error


def test_a_key_goes_with_engines_that_are_launched_with_one(tmp_path: Path) -> None:
    model = f"models: {{a: {{path: x, engine_key: {{env: KEY}}, {LAUNCHED}}}}}\n"
    assert (
        _load(tmp_path, model + "launch: {flags: --api-key=k}\n").models["a"].engine_key is not None
    )


def test_settings_are_printed_without_their_secrets(tmp_path: Path) -> None:
    cache = "cache: {url: 'redis://:SECRET@h'}\n"
    assert "SECRET" not in repr(_load(tmp_path, MODELS + cache + "api_keys: {alice: SECRET}\n"))
    assert "SECRET" not in repr(load_config(tmp_path / "router.yaml", {}, with_keys=False))


def test_an_open_address_without_keys_is_refused(tmp_path: Path) -> None:
    error = _error(tmp_path, MODELS + "listen: {host: 0.0.0.0}\n")
    assert "0.0.0.0" in str(error)
    assert "api_keys" in error.remedy


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2", "'::1'"])
def test_an_address_of_this_machine_needs_no_keys(tmp_path: Path, host: str) -> None:
    assert _load(tmp_path, MODELS + f"listen: {{host: {host}}}\n").api_keys == {}


def test_a_host_name_counts_as_open(tmp_path: Path) -> None:
    assert "router.example" in str(_error(tmp_path, MODELS + "listen: {host: router.example}\n"))


def test_an_open_address_with_keys_is_accepted(tmp_path: Path) -> None:
    assert not _load(
        tmp_path, MODELS + "listen: {host: 0.0.0.0}\napi_keys: {alice: k}\n"
    ).listen.loopback


@pytest.mark.parametrize(
    ("text", "drafts"), [("off", False), ("'off'", False), ("on", True), ("auto", "auto")]
)
def test_drafts_of_a_model_are_a_switch_with_a_middle(
    tmp_path: Path, text: str, drafts: object
) -> None:
    assert (
        _load(tmp_path, f"models: {{small: {{path: m, drafts: {text}}}}}\n").models["small"].drafts
        == drafts
    )


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (MODELS + "limits:\n  drain: 3\n", 3, "Did you mean 'drain_s'?"),
        (
            MODELS + "listen: {port: many}\n",
            2,
            "listen.port must be a whole number at least 0 and at most 65535, not 'many'",
        ),
        (
            MODELS + "limits:\n  drain_s: 1e3\n",
            3,
            "limits.drain_s must be a number above 0, not '1e3'. Write 1000.",
        ),
        (
            MODELS + "listen: {port: true}\n",
            2,
            "must be a whole number at least 0 and at most 65535, not true",
        ),
        (MODELS + "listen: {port: 70000}\n", 2, "at most 65535, not 70000"),
        (MODELS + "listen: []\n", 2, "listen must be a mapping, not an empty list"),
        (MODELS + "topologies: here\n", 2, "topologies must be a list, not 'here'"),
        (
            MODELS + "cache: {backend: disk}\n",
            2,
            "cache.backend must be 'memory' or 'redis', not 'disk'",
        ),
        (MODELS + "cache: {url: 'http://x'}\n", 2, "redis://"),
        (MODELS + "cache: {ttl_s: 0}\n", 2, "cache.ttl_s must be a number above 0"),
        (
            MODELS + "batches: {concurrency: 0}\n",
            2,
            "concurrency must be a whole number at least 1",
        ),
        (
            MODELS + "batches: {max_file_bytes: -1}\n",
            2,
            "max_file_bytes must be a whole number at least 1",
        ),
        (MODELS + "embedder: {model: 3}\n", 2, "Put it in quotes"),
        (
            MODELS + "record: {folder: logs}\naccess_log: {folder: other/../logs}\n",
            1,
            "access_log.folder are one",
        ),
        (MODELS + MODELS, 2, "first in line 1"),
        (MODELS + "listen:\n", 2, "listen must be a mapping, not empty"),
        ("models: {}\n", 1, "models is empty"),
        ("listen: {port: 1}\n", 1, "The file lacks 'models'"),
        ("models:\n  a: {context_length: 4}\n", 2, "models.a lacks 'path'"),
        (
            "models:\n  a: {path: x, drafts: maybe}\n",
            2,
            "drafts must be on or off or 'auto', not 'maybe'",
        ),
        ("models:\n  a: {path: x, pairs: [{prefill: a, decode: b}]}\n", 2, "http(s) URL"),
        (
            "models:\n  a: {path: x, pairs: [{prefill: 'http://a'}]}\n",
            2,
            "models.a.pairs[0] lacks 'decode'",
        ),
        (
            f"models:\n  a: {{path: x, embedded: {{}}, {PAIR}}}\n",
            2,
            "not by both pairs and embedded",
        ),
        (
            f"models:\n  a: {{path: x, servers: ['http://a'], {PAIR}}}\n",
            2,
            "not by both pairs and servers",
        ),
        (
            "models:\n  a: {path: x, servers: ['http://localhost', {server: 'http://127.0.0.1/'}]}\n",
            2,
            "a pair or a server is there twice",
        ),
        (
            "models:\n  a: {path: x, servers: [{server: 'http://a', launch: {gpus: [1], "
            "expert_placement: swap}}]}\n",
            2,
            "the server has not several GPUs",
        ),
        (
            "models:\n  a: {path: x, engine_key: k}\n",
            2,
            "engine_key is for pairs or servers, and there are none",
        ),
        (
            "models:\n  a: {path: x, engine_tls: {}}\n",
            2,
            "engine_tls is for pairs or servers, and there are none",
        ),
        (
            f"models:\n  a: {{path: x, engine_tls: {{}}, {PAIR}}}\n",
            2,
            "not all of the engines have https:// URLs",
        ),
        (
            f"models:\n  a: {{path: x, engine_key: k, {LAUNCHED}}}\n",
            1,
            "models.a has an engine_key, and the engines",
        ),
        (
            (
                f"models:\n  a: {{path: x, engine_key: k, {LAUNCHED}}}\nlaunch: {{decode_flags: "
                f"--api-key k}}\n"
            ),
            1,
            "models.a has an engine_key, and the engines",
        ),
        (
            "models:\n  a: {path: x, pairs: [{prefill: 'http://a', decode: 'http://b'},"
            " {prefill: 'http://a', decode: 'http://c', bootstrap_port: 9}]}\n",
            2,
            "different bootstrap hosts or ports",
        ),
        (
            f"models:\n  a: {{path: m, {PAIR}, adapters: {{'no colon: please': a}}}}\n",
            2,
            "adapters.no colon: please must be a name of letters",
        ),
        (
            "models:\n  a: {path: m, adapters: {odd: a}}\n",
            2,
            "adapters is for pairs or servers, and there are none",
        ),
        (
            "models: {a: {path: m}}\nswapping: {}\n",
            2,
            "swapping has both max_loaded_models and pairs, or neither",
        ),
        (
            f"models: {{a: {{path: m}}}}\nswapping: {{max_loaded_models: 1, {PAIR}}}\n",
            2,
            "pairs, or neither",
        ),
        (
            "models: {a: {path: m}}\nswapping: {max_loaded_models: 1, models: [b]}\n",
            1,
            "swapping names 'b'",
        ),
        (
            "models: {a: {path: m}}\nswapping: {max_loaded_models: 1, usage: {b: 1}}\n",
            1,
            "swapping names 'b'",
        ),
        (
            f"models: {{a: {{path: m, {PAIR}}}}}\nswapping: {{{PAIR}}}\n",
            1,
            "models.a takes turns with others, and names engines of its own",
        ),
        (
            (
                f"models: {{a: {{path: m, {PAIR}}}, b: {{path: m}}}}\nswapping: "
                f"{{max_loaded_models: "
                f"1}}\n"
            ),
            1,
            "some of the models that take turns have engines of their own, and others have none",
        ),
        (
            f"models: {{a: {{path: m, {PAIR}}}, b: {{path: m, {PAIR}}}}}\n"
            "swapping: {max_loaded_models: 1, models: [a]}\n",
            1,
            "http://a is named twice, and serves models that take turns",
        ),
        (
            f"models: {{a: {{path: m, {PAIR}, adapters: {{odd: a}}}}}}\n"
            "swapping: {max_loaded_models: 1}\n",
            1,
            "models.a takes turns with others, and has adapters",
        ),
        (
            f"models: {{a: {{path: m, {LAUNCHED}}}}}\nswapping: {{max_loaded_models: 1}}\n"
            "launch: {decode_flags: --device cpu}\n",
            1,
            "models.a sleeps while others are awake, and is started on a CPU, where SGLang cannot",
        ),
        (
            f"models: {{a: {{path: m, {LAUNCHED}}}}}\nswapping: {{max_loaded_models: 1}}\n"
            "launch: {flags: --device=cpu}\n",
            1,
            "Sleeping gives GPU memory back",
        ),
        (
            (
                f"models: {{a: {{path: m}}, b: {{path: m, {PAIR}}}}}\nswapping: {{models: [a], "
                f"{PAIR}}}\n"
            ),
            1,
            "is named twice, and serves models that take turns",
        ),
        ("models: [\n", 2, "Not valid YAML"),
        ("", 1, "empty"),
    ],
)
def test_an_error_names_file_line_and_remedy(
    tmp_path: Path, text: str, line: int, words: str
) -> None:
    error = _error(tmp_path, text)
    assert str(error).startswith(f"{tmp_path / 'router.yaml'}:{line}: ")
    assert words in str(error)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml", {})


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_the_shipped_deployments_are_valid(file: Path) -> None:
    assert load_config(file, {"SHELL_ROUTER_KEY": "k"}).models


def test_an_embedder_that_begins_with_a_dot_is_a_folder_from_the_files_own(tmp_path: Path) -> None:
    assert _load(tmp_path, MODELS + "embedder: {model: ./mine}").embedder.model == str(
        tmp_path / "mine"
    )
    assert _load(tmp_path, MODELS + "embedder: {model: Qwen/Qwen3}").embedder.model == "Qwen/Qwen3"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://::1:9401",
        "http://host:abc",
        "http://[::1",
        "http:///x",
        "http://a b:1",
        "http://xn--a",
        "http://user:hid@den@host:99999",
        "http://user:hid/den@host",
        "ftp://user:hid/den@host",
        "http://host:1?token=hidden",
        "http://host:1#hidden",
    ],
)
def test_an_engine_url_that_no_request_can_be_sent_to_is_one_line_with_a_remedy(
    tmp_path: Path, url: str
) -> None:
    pair = f'{{prefill: "{url}", decode: "http://[::1]:30001"}}'
    error = _error(tmp_path, f"models: {{a: {{path: a, pairs: [{pair}]}}}}\n")
    assert str(error).startswith(f"{tmp_path / 'router.yaml'}:1: models.a.pairs[0]")
    assert error.remedy and "\n" not in str(error) and "hid" not in str(error)


@pytest.mark.parametrize(
    "again", ["http://127.0.0.1:80", "http://localhost", "http://127.0.0.1/", "http://u@127.0.0.1"]
)
def test_a_pair_is_named_once_in_whichever_spelling(tmp_path: Path, again: str) -> None:
    decode = 'decode: "http://b:1"'
    pairs = f'[{{prefill: "http://127.0.0.1", {decode}}}, {{prefill: "{again}", {decode}}}]'
    error = _error(tmp_path, f"models: {{a: {{path: a, pairs: {pairs}}}}}\n")
    assert "a pair or a server is there twice" in str(error)
