from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.transfer.select import NAMES
from replica_agent.errors import SettingsError
from replica_agent.settings import TRANSPORTS, load_settings

ENGINE = ["--engine", "http://127.0.0.1:8100/"]


def test_defaults() -> None:
    settings = load_settings(ENGINE, {})
    assert settings.engine == "http://127.0.0.1:8100"
    assert (settings.host, settings.port, settings.replica_id) == ("127.0.0.1", 8200, "replica-0")
    assert (settings.kv_events, settings.kv_replay) == ("tcp://127.0.0.1:5557", None)
    assert (settings.model, settings.model_dir, settings.token) == (None, None, None)
    assert (settings.kv_socket, settings.pool_bytes, settings.data_port) == (None, 2**30, 0)
    assert (settings.fetch, settings.fetch_margin, settings.lease_ttl_s) == ("on", 0.1, 10.0)
    assert settings.transports == ("shm", "nixl", "tcp")
    assert not settings.debug


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
        ([*ENGINE, "--kv-socket", "/" + 100 * "x"], {}, "--kv-socket"),
        ([*ENGINE, "--pool-bytes", "1"], {}, "--pool-bytes"),
        ([*ENGINE, "--fetch", "maybe"], {}, "--fetch"),
        ([*ENGINE, "--fetch-margin", "1"], {}, "--fetch-margin"),
        ([*ENGINE, "--fetch-margin", "some"], {}, "--fetch-margin"),
        (ENGINE, {"REPLICA_AGENT_TRANSPORTS": "shm,rdma"}, "REPLICA_AGENT_TRANSPORTS"),
        ([*ENGINE, "--transports", "tcp,tcp"], {}, "--transports"),
        ([*ENGINE, "--transports", ""], {}, "--transports"),
        *(
            ([*ENGINE, "--data-advertise", value], {}, "--data-advertise")
            for value in (
                "7000",
                ":7000",
                "host",
                "host:",
                "host:0",
                "host:70000",
                "http://host:1",
                "u@host:1",
                "host:1/",
            )
        ),
        ([*ENGINE, "--engine-api-key-file", "/no/such/file"], {}, "--engine-api-key-file"),
        (ENGINE, {"REPLICA_AGENT_ENGINE_API_KEY": ""}, "REPLICA_AGENT_ENGINE_API_KEY"),
        (ENGINE, {"REPLICA_AGENT_ENGINE_API_KEY": "schlüssel"}, "REPLICA_AGENT_ENGINE_API_KEY"),
        ([*ENGINE, "--engine-ca-file", "/ca.pem"], {}, "--engine-ca-file"),
        (["--engine", "https://e:1", "--engine-ca-file", "/no/such/file"], {}, "--engine-ca-file"),
        (["--engine", "https://e:1"], {"REPLICA_AGENT_ENGINE_CERT_FILE": "/cert.pem"}, "--engine-key-file"),
        ([*ENGINE, "--tls-cert-file", "/cert.pem"], {}, "--tls-key-file"),
        ([*ENGINE, "--tls-ca-file", "/ca.pem"], {}, "--tls-cert-file"),
        ([*ENGINE], {"REPLICA_AGENT_TLS_CERT_FILE": "/no", "REPLICA_AGENT_TLS_KEY_FILE": "/no"}, "--tls-cert-file"),
        ([*ENGINE, "--lease-ttl", "60"], {}, "--lease-ttl"),
        ([*ENGINE, "--log-level", "loud"], {}, "--log-level"),
        ([*ENGINE, "--debug", "yes"], {}, "--debug"),
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


def test_the_engines_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert load_settings(ENGINE, {}).engine_api_key is None
    assert load_settings(ENGINE, {"REPLICA_AGENT_ENGINE_API_KEY": "from-env"}).engine_api_key == "from-env"
    assert load_settings([*ENGINE, "--engine-api-key-file", str(file)], {}).engine_api_key == "from-file"


def test_tls_is_for_https_alone() -> None:
    assert load_settings(ENGINE, {}).engine_tls is None
    assert load_settings(["--engine", "https://e:1"], {}).engine_tls is not None


def test_a_publishers_wildcard_address_is_a_local_one_for_a_subscriber() -> None:
    assert load_settings([*ENGINE, "--kv-events", "tcp://*:5557"], {}).kv_events == "tcp://127.0.0.1:5557"


def test_where_peers_reach_the_tcp_transport() -> None:
    assert load_settings(ENGINE, {}).data_advertise is None
    for value, address in (("node.example:7000", ("node.example", 7000)), ("[fd00::1]:7000", ("fd00::1", 7000))):
        assert load_settings([*ENGINE, "--data-advertise", value], {}).data_advertise == address


def test_the_transports_are_those_there_are() -> None:
    assert TRANSPORTS == NAMES
    assert load_settings([*ENGINE, "--transports", "tcp, shm"], {}).transports == ("tcp", "shm")
