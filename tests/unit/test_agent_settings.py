from __future__ import annotations

from pathlib import Path

import pytest

from replica_agent.errors import SettingsError
from replica_agent.settings import load_settings

ENGINE = ["--engine", "http://127.0.0.1:8100/"]


def test_defaults() -> None:
    settings = load_settings(ENGINE, {})
    assert settings.engine == "http://127.0.0.1:8100"
    assert (settings.host, settings.port, settings.replica_id) == ("127.0.0.1", 8200, "replica-0")
    assert (settings.kv_events, settings.kv_replay) == ("tcp://127.0.0.1:5557", None)
    assert (settings.model, settings.model_dir, settings.token) == (None, None, None)


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default() -> None:
    environ = {"REPLICA_AGENT_PORT": "9000", "REPLICA_AGENT_ROUTE_SEED": "0x10", "HOME": "/"}
    settings = load_settings([*ENGINE, "--port", "9001"], environ)
    assert (settings.port, settings.route_seed) == (9001, 16)
    assert load_settings([], {"REPLICA_AGENT_ENGINE": "http://e:1"}).engine == "http://e:1"


@pytest.mark.parametrize(
    ("argv", "environ", "key"),
    [
        ([], {}, "--engine"),
        (["--engine", "127.0.0.1:8100"], {}, "--engine"),
        ([*ENGINE, "--port", "70000"], {}, "--port"),
        (ENGINE, {"REPLICA_AGENT_PORT": "tcp://10.0.0.1:8200"}, "REPLICA_AGENT_PORT"),
        (ENGINE, {"REPLICA_AGENT_PROT": "1"}, "REPLICA_AGENT_PROT"),
        ([*ENGINE, "--kv-events", "5557"], {}, "--kv-events"),
        ([*ENGINE, "--route-seed", "-1"], {}, "--route-seed"),
        ([*ENGINE, "--model-dir", "/no/such/directory"], {}, "--model-dir"),
        ([*ENGINE, "--heartbeat-interval", "soon"], {}, "--heartbeat-interval"),
        ([*ENGINE, "--token-file", "/no/such/file"], {}, "--token-file"),
        (ENGINE, {"REPLICA_AGENT_TOKEN": " "}, "REPLICA_AGENT_TOKEN"),
    ],
)
def test_a_bad_value_stops_the_start_and_names_the_key(argv: list[str], environ: dict[str, str], key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(argv, environ)
    assert caught.value.key == key
    assert key in str(caught.value)


def test_variables_that_kubernetes_sets_for_a_service_are_not_ours() -> None:
    environ = {"REPLICA_AGENT_SERVICE_HOST": "10.0.0.1", "REPLICA_AGENT_PORT_8200_TCP": "tcp://10.0.0.1:8200"}
    assert load_settings(ENGINE, environ).port == 8200


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert load_settings(ENGINE, {"REPLICA_AGENT_TOKEN": "from-env"}).token == "from-env"
    assert load_settings([*ENGINE, "--token-file", str(file)], {}).token == "from-file"


def test_a_publishers_wildcard_address_is_a_local_one_for_a_subscriber() -> None:
    assert load_settings([*ENGINE, "--kv-events", "tcp://*:5557"], {}).kv_events == "tcp://127.0.0.1:5557"
