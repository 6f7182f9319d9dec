"""A configuration is read whole or not at all, and an error names the key."""

from __future__ import annotations

import pytest

from gateway.errors import SettingsError
from gateway.settings import load_settings

REPLICAS = """
replicas:
  - {id: replica-0, engine: "http://127.0.0.1:8100", agent: "http://127.0.0.1:8200"}
  - {id: replica-1, engine: "http://127.0.0.1:8101", weight: 2}
"""


def load(tmp_path, text="", environ=None, overrides=None):
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    return load_settings(path, environ or {}, overrides)


def test_later_sources_win(tmp_path):
    settings = load(
        tmp_path,
        REPLICAS + "listen: {port: 1, host: 0.0.0.0, admin_port: 5}\nlimits: {retry_budget: 0}",
        {"PREFIX_GATEWAY_LISTEN__PORT": "2", "PREFIX_GATEWAY_LISTEN__ADMIN_PORT": "6", "OTHER": "x"},
        {"listen": {"port": 3}},
    )
    assert (settings.listen.port, settings.listen.host, settings.listen.admin_port) == (3, "0.0.0.0", 6)
    assert settings.limits.retry_budget == 0
    assert [replica.weight for replica in settings.replicas] == [1.0, 2.0]


def test_replicas_from_the_environment():
    environ = {"PREFIX_GATEWAY_REPLICAS": '[{"id": "a", "engine": "http://h:1"}]', "PREFIX_GATEWAY_AGENT_TOKEN": "t"}
    settings = load_settings(None, environ)
    assert (settings.replicas[0].id, settings.agent_token) == ("a", "t")


def test_the_token_may_come_from_a_file(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    assert load(tmp_path, "", {"PREFIX_GATEWAY_AGENT_TOKEN_FILE": str(tmp_path / "token")}).agent_token == "secret"


@pytest.mark.parametrize(
    ("text", "environ", "named"),
    [
        ("listen: {prot: 1}", {}, "listen: Object contains unknown field `prot`"),
        ("listens: {port: 1}", {}, "unknown field `listens`"),
        ("listen: {port: high}", {}, "listen.port"),
        ("listen: {port: 70000}", {}, "listen.port"),
        ("listen: {name: a b}", {}, "listen.name: 'a b'"),
        ("listen: {name: " + "a" * 129 + "}", {}, "listen.name"),
        ("placement: {epsilon: 0}", {}, "placement.epsilon"),
        ("placement: {index_bytes: 16777215}", {}, "placement.index_bytes"),
        ("placement: {slow_start_s: -1}", {}, "placement.slow_start_s"),
        ("placement: {slow_start_s: .inf}", {}, "placement.slow_start_s"),
        ("observe_only: {}", {}, "observe_only"),
        ("observe_only: true\nreplicas: [{id: a, engine: 'http://a:1'}]", {}, "observe_only"),
        ("", {"PREFIX_GATEWAY_OBSERVE_ONLY__X": "1"}, "PREFIX_GATEWAY_OBSERVE_ONLY__X"),
        ("placement: {route_seed: -1}", {}, "placement.route_seed"),
        ("fetch: {margin: 1}", {}, "fetch.margin"),
        ("fetch: {margin: -0.1}", {}, "fetch.margin"),
        ("fetch: {enabled: perhaps}", {}, "fetch.enabled"),
        ("fetch: {max_deadline_ms: 0}", {}, "fetch.max_deadline_ms"),
        ("", {"PREFIX_GATEWAY_FETCH__MAX_DEADLINE_MS": "30001"}, "fetch.max_deadline_ms"),
        ("limits: {retry_budget: 2}", {}, "limits.retry_budget"),
        ("limits: {max_body_bytes: 0}", {}, "limits.max_body_bytes"),
        ("telemetry: {log_level: loud}", {}, "telemetry.log_level"),
        ("replicas: [{id: a, engine: 'h:1'}]", {}, "replicas[0].engine"),
        ("replicas: [{id: a, engine: 'http://h:x'}]", {}, "replicas[0].engine"),
        ("replicas: [{id: a, engine: 'http://h/v1'}]", {}, "replicas[0].engine"),
        ("replicas: [{id: a, engine: 'http://h:1', weight: 0}]", {}, "replicas[0].weight"),
        ("replicas: [{engine: 'http://h:1'}]", {}, "replicas[0]"),
        (REPLICAS.replace("replica-1", "replica-0"), {}, "replicas[1].id"),
        ("replicas: [{id: a, engine: 'http://h:1', weight: .inf}]", {}, "replicas[0].weight"),
        ("replicas: [{id: a, engine: 'http://h:1', weight: 1000}]", {}, "replicas[0].weight"),
        ("replicas: [{id: 'a\\nb', engine: 'http://h:1'}]", {}, "replicas[0].id"),
        ("replicas: [{id: a, engine: 'http://[::1'}]", {}, "replicas[0].engine"),
        ("replicas: [{id: a, engine: 'http://u:p@h:1'}]", {}, "replicas[0].engine"),
        ("limits: {connect_timeout_s: .inf}", {}, "limits.connect_timeout_s"),
        ("limits: {body_timeout_s: .nan}", {}, "limits.body_timeout_s"),
        ("placement: {epsilon: .inf}", {}, "placement.epsilon"),
        ("", {"PREFIX_GATEWAY_AGENT_TOKEN": "päss"}, "PREFIX_GATEWAY_AGENT_TOKEN"),
        ("agent_token: x", {}, "agent_token"),
        ("engine_api_key: x", {}, "engine_api_key: secrets come from PREFIX_GATEWAY_ENGINE_API_KEY"),
        ("replicas: [{id: a, engine: 'http://h:1', api_key: x}]", {}, "unknown field `api_key`"),
        ("engine_tls: {ca: x}", {}, "engine_tls: Object contains unknown field `ca`"),
        ("", {"PREFIX_GATEWAY_ENGINE_API_KEY_FILE": "/absent"}, "PREFIX_GATEWAY_ENGINE_API_KEY_FILE"),
        ("", {"PREFIX_GATEWAY_ENGINE_API_KEY": "two\nlines"}, "PREFIX_GATEWAY_ENGINE_API_KEY"),
        ("replicas: [{id: a, engine: 'http://h:1', dp_rank: -1}]", {}, "replicas[0].dp_rank"),
        ("replicas: [{id: a, engine: 'http://h:1'}, {id: b, engine: 'http://h:1/'}]", {}, "replicas[1].dp_rank"),
        (
            "replicas: [{id: a, engine: 'http://h:1', dp_rank: 0}, {id: b, engine: 'http://h:1'}]",
            {},
            "replicas[1].dp_rank",
        ),
        (
            "replicas: [{id: a, engine: 'http://h:1', dp_rank: 1}, {id: b, engine: 'http://h:1', dp_rank: 1}]",
            {},
            "replicas[1].dp_rank: replicas that share an engine need one each, beside a: 1",
        ),
        ("[1]", {}, "expected sections"),
        ("a: [", {}, "not YAML"),
        ("", {"PREFIX_GATEWAY_NOWHERE__PORT": "1"}, "PREFIX_GATEWAY_NOWHERE__PORT"),
        ("", {"PREFIX_GATEWAY_LISTEN__PRT": "1"}, "unknown field `prt`"),
        (REPLICAS, {"PREFIX_GATEWAY_REPLICAS__ID": "1"}, "PREFIX_GATEWAY_REPLICAS__ID"),
        ("", {"PREFIX_GATEWAY_AGENT_TOKEN_FILE": "/absent"}, "PREFIX_GATEWAY_AGENT_TOKEN_FILE"),
    ],
)
def test_an_error_names_the_key(tmp_path, text, environ, named):
    with pytest.raises(SettingsError) as error:
        load(tmp_path, text, environ)
    assert named in str(error.value)


def test_the_engines_key_comes_from_the_environment_or_a_file(tmp_path):
    assert load(tmp_path, "", {"PREFIX_GATEWAY_ENGINE_API_KEY": "key"}).engine_api_key == "key"
    (tmp_path / "key").write_text("from-file\n")
    assert (
        load(tmp_path, "", {"PREFIX_GATEWAY_ENGINE_API_KEY_FILE": str(tmp_path / "key")}).engine_api_key == "from-file"
    )


def test_ranks_share_an_engine(tmp_path):
    two = "replicas: [{id: a, engine: 'http://h:1', dp_rank: 0}, {id: b, engine: 'http://h:1', dp_rank: 1}]"
    assert [replica.dp_rank for replica in load(tmp_path, two).replicas] == [0, 1]


def test_an_empty_section_is_all_defaults(tmp_path):
    settings = load(tmp_path, "listen:\nlimits:\n", {}, {"listen": {"port": 3}})
    assert (settings.listen.port, settings.listen.admin_port) == (3, 8001)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"absent\.yaml"):
        load_settings(tmp_path / "absent.yaml", {})
