"""The configuration: YAML in, strict immutable records out.

An unknown key, a wrong type or a value out of range is an error that names its path.
"""

import ipaddress
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import inspect

from ciuicflow.engines.table import ADAPTERS
from ciuicflow.errors import ConfigError, StartError
from ciuicflow.flowcontrol.tiers import FlowConfig, Name
from ciuicflow.observability.logs import LogConfig
from ciuicflow.routing.health import HealthPolicy, PositiveSeconds

_T = TypeVar("_T")

Bytes = Annotated[int, msgspec.Meta(ge=1024, le=1 << 40)]
RoutingName = Literal["round_robin", "least_load", "power_of_two"]
EngineName = Literal["auto", "vllm", "sglang", "llamacpp", "openai"]
ROUTING_NAMES: Final[tuple[str, ...]] = get_args(RoutingName)


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A record that refuses what it does not know."""


class Address(msgspec.Struct, frozen=True):
    """Where to listen."""

    host: str
    port: int  # 0: any free port

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read HOST:PORT, an IPv6 host in brackets. Raises ValueError."""
        host, separator, port = text.rpartition(":")
        if not separator or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"expected HOST:PORT such as 127.0.0.1:8080, got {text!r}")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"an IPv6 host goes in brackets: [::1]:8080, got {text!r}")
        if not host:
            raise ValueError(f"expected HOST:PORT, got {text!r}; 0.0.0.0 listens everywhere")
        return cls(host, int(port))

    def __str__(self) -> str:
        """Return HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UpstreamUrl(msgspec.Struct, frozen=True):
    """Where an upstream lives."""

    tls: bool
    host: str
    port: int
    prefix: str  # path without a trailing slash; empty for the root

    @classmethod
    def parse(cls, text: str) -> "UpstreamUrl":
        """Read an http or https URL. Raises ValueError."""
        wanted = f"expected a URL such as http://127.0.0.1:8000, got {text!r}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{wanted}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(wanted)
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError(f"{wanted}: no user, query or fragment belongs in it")
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError(f"{wanted}: it holds a character that is not allowed in a URL")
        tls = parts.scheme == "https"
        if port is None:
            port = 443 if tls else 80
        return cls(tls, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """HOST or HOST:PORT, as a Host field carries it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        """Return the URL."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"


class ServerTls(_Strict, frozen=True):
    """The certificate that clients see; PEM files."""

    cert_file: str
    key_file: str

    def context(self) -> ssl.SSLContext:
        """Load the files. Raises StartError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise StartError(
                f"cannot load the certificate {self.cert_file} with the key {self.key_file}: "
                f"{error}. Give PEM files that belong together in $.tls"
            ) from None
        return context


class Upstream(_Strict, frozen=True):
    """One engine server, as configured."""

    url: str
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    models: list[str] | None = None
    host: Literal["preserve", "upstream"] | None = None
    ca_file: str | None = None
    verify: bool = True
    engine: EngineName = "auto"
    send_priority: bool = False
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] | None = None
    probe_headers: dict[str, str] = {}

    @property
    def address(self) -> UpstreamUrl:
        """The URL, parsed."""
        return UpstreamUrl.parse(self.url)

    @property
    def id(self) -> str:
        """The name, or HOST:PORT."""
        return self.name or f"{self.address.host}:{self.address.port}{self.address.prefix}"

    @property
    def own_host(self) -> bool:
        """Whether requests carry the upstream's own name as Host.

        Unless configured, only https upstreams get it: they are mostly shared front ends that
        choose by name, while an engine on http takes any Host and should see the client's.
        """
        return self.address.tls if self.host is None else self.host == "upstream"

    def tls_context(self) -> ssl.SSLContext | None:
        """Make the client context; None for http. Raises StartError."""
        if not self.address.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ValueError) as error:
            raise StartError(f"cannot load ca_file {self.ca_file} of {self.url}: {error}") from None
        context.set_alpn_protocols(["http/1.1"])
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class Tenant(_Strict, frozen=True):
    """A caller who is known by an API key, and what it may use."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    keys_sha256: list[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]]
    tiers: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None  # default: all


class UnknownKeys(_Strict, frozen=True):
    """What opted-in requests may do that carry no key of a tenant."""

    accept: bool = True
    tiers: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None  # default: all


class Flow(FlowConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What opted-in requests get; the settings of FlowConfig among it."""

    enabled: bool = True  # false: every request bypasses, whatever its header says
    bypass_tier: Name | None = None  # enrols requests without the header in this tier
    heartbeat_s: PositiveSeconds | None = None  # comments on streams that wait; commits a 200
    tenants: tuple[Tenant, ...] = ()
    unknown_keys: UnknownKeys = UnknownKeys()


class Limits(_Strict, frozen=True):
    """Bounds on what a client may make the gateway hold."""

    header_bytes: Bytes = 65536
    uri_bytes: Bytes = 16384
    body_bytes: Bytes = 64 << 20  # base64 images of 40 MB are in use
    buffered_bytes: Bytes = 512 << 20  # bodies held in all, while their model is looked up
    connections: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 65536


class Timeouts(_Strict, frozen=True):
    """How long each wait may last, in seconds."""

    header_s: PositiveSeconds = 10.0  # from a head's first byte to its last
    idle_s: PositiveSeconds = 75.0  # a client connection between two requests
    body_s: PositiveSeconds = 60.0  # a client that sends (or takes) no byte in mid-message
    connect_s: PositiveSeconds = 5.0  # to an upstream, its TLS handshake included
    response_s: PositiveSeconds = 3600.0  # until the first response byte: reasoning takes long
    stall_s: PositiveSeconds = 3600.0  # silence within a response: 15 minutes are legal
    drain_s: PositiveSeconds = 60.0  # how long running exchanges may go on after SIGTERM
    settle_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 2.0  # from not ready to not listening


class Config(_Strict, frozen=True):
    """All of it."""

    upstreams: Annotated[list[Upstream], msgspec.Meta(min_length=1, max_length=1024)]
    listen: str = "127.0.0.1:8080"
    admin: str = "127.0.0.1:9090"
    tls: ServerTls | None = None
    routing: RoutingName = "least_load"
    flow: Flow = Flow()
    trusted_peers: list[str] = []  # networks whose X-Forwarded-For is believed
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    health: HealthPolicy = HealthPolicy()
    log: LogConfig = LogConfig()


def _check(config: Config) -> None:
    """Check what types cannot say. Raises ConfigError."""
    listen = _parsed("$.listen", Address.parse, config.listen)
    admin = _parsed("$.admin", Address.parse, config.admin)
    if listen == admin and listen.port:
        raise ConfigError(f"$.admin: listen is {listen} too: they need a port each")
    names: set[str] = set()
    for index, upstream in enumerate(config.upstreams):
        path = f"$.upstreams[{index}]"
        url = _parsed(f"{path}.url", UpstreamUrl.parse, upstream.url)
        for own in (listen, admin):
            if own.port and (own.host, own.port) == (url.host, url.port):
                raise ConfigError(f"{path}.url: {url} is this gateway's own address")
        if upstream.id in names:
            raise ConfigError(f"{path}.name: {upstream.id!r} is taken; expected a name of its own")
        names.add(upstream.id)
        _check_engine(path, upstream)
        for name, value in upstream.probe_headers.items():
            if not (name.isascii() and name.isprintable() and value.isprintable()):
                raise ConfigError(f"{path}.probe_headers: {name!r} is not a header")

    for index, peer in enumerate(config.trusted_peers):
        _parsed(f"$.trusted_peers[{index}]", ipaddress.ip_network, peer)
    _check_flow(config.flow)


def _check_engine(path: str, upstream: Upstream) -> None:
    if not upstream.send_priority:
        return
    if upstream.engine == "auto" or ADAPTERS[upstream.engine].priority_order is None:
        having = [name for name, adapter in ADAPTERS.items() if adapter.priority_order]
        raise ConfigError(
            f"{path}.send_priority: expected `engine` to name one that has priorities: "
            f"{', '.join(having)}"
        )


def _check_flow(flow: Flow) -> None:
    tiers = {tier.name for tier in flow.tiers}
    wanted = [("bypass_tier", flow.bypass_tier)] if flow.bypass_tier else []
    wanted += [("unknown_keys.tiers", name) for name in flow.unknown_keys.tiers or ()]
    owners: dict[str, str] = {}
    for index, tenant in enumerate(flow.tenants):
        path = f"tenants[{index}]"
        wanted += [(f"{path}.tiers", name) for name in tenant.tiers or ()]
        for key in tenant.keys_sha256:
            if owners.setdefault(key, tenant.name) != tenant.name:
                raise ConfigError(
                    f"$.flow.{path}.keys_sha256: {owners[key]!r} has {key[:8]}... too"
                )
    for path, name in wanted:
        if name not in tiers:
            raise ConfigError(f"$.flow.{path}: {name!r} is no tier; expected {sorted(tiers)}")


def _parsed(path: str, parse: Callable[[str], _T], text: str) -> _T:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _expected(path: str) -> str:
    """Say which words may stand at a path, where they are few: values, or keys of a mapping."""
    kinds: list[inspect.Type] = [inspect.type_info(Config)]
    for key in re.findall(r"\.(\w+)|\[", path):  # empty: an item of a list
        kinds = [inner for kind in kinds for inner in _inner(kind, key)]
    words = [word for kind in kinds for word in _words(kind)]
    return f"; expected {', '.join(words)}" if words else ""


def _inner(kind: inspect.Type, key: str) -> list[inspect.Type]:
    found: list[inspect.Type] = []
    if isinstance(kind, inspect.StructType):
        found = [field.type for field in kind.fields if field.encode_name == key]
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType) and not key:
        found = [kind.item_type]
    return [
        member
        for inner in found
        for member in (inner.types if isinstance(inner, inspect.UnionType) else (inner,))
    ]


def _words(kind: inspect.Type) -> list[str]:
    if isinstance(kind, inspect.LiteralType):
        return [str(value) for value in kind.values]
    if isinstance(kind, inspect.StructType):
        return [field.encode_name for field in kind.fields]
    return []


def decode(data: object) -> Config:
    """Turn decoded YAML into records. Raises ConfigError with the path of what is wrong."""
    if not isinstance(data, dict):
        raise ConfigError("$: expected a mapping with at least `upstreams`")
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        message, _, path = str(error).rpartition(" - at ")
        if not message:
            message, path = str(error), "$"
        path = path.strip("`")
        raise ConfigError(f"{path}: {message}{_expected(path)}") from None
    _check(config)
    return config


def load(path: Path | None, overrides: dict[str, Any]) -> Config:
    """Read a file and lay the command line's `overrides` over it. Raises ConfigError."""
    data: object = {}
    if path is not None:
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a mapping with at least `upstreams`")
    try:
        return decode({**data, **overrides} if isinstance(data, dict) else data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from None
