"""The messages of the picker are generated from their definition, and are those of Envoy.

Envoy's program contains the complete definitions as descriptors.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from epp_world import example, needs_envoy
from lmetric.server.epp import ext_proc_pb2

ROOT = Path(__file__).parent.parent
MESSAGES = ROOT / "python" / "lmetric" / "server" / "epp"
FILES = (
    "envoy/service/ext_proc/v3/external_processor.proto",
    "envoy/extensions/filters/http/ext_proc/v3/processing_mode.proto",
    "envoy/config/core/v3/base.proto",
    "envoy/type/v3/http_status.proto",
    "src/proto/grpc/health/v1/health.proto",
)
Message = descriptor_pb2.DescriptorProto
Enum = descriptor_pb2.EnumDescriptorProto
Field = descriptor_pb2.FieldDescriptorProto
SYNTAX = 12  # the last field of a file's descriptor


def test_the_generated_messages_are_fresh(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [ROOT / "scripts" / "make_ext_proc", tmp_path]
    subprocess.run(command, check=True, env={**os.environ, "PATH": path}, timeout=60)
    for name in ("ext_proc_pb2.py", "ext_proc_pb2.pyi"):
        assert (tmp_path / name).read_text() == (MESSAGES / name).read_text(), "run scripts/make_ext_proc"


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _file(program: mmap.mmap, name: str) -> descriptor_pb2.FileDescriptorProto:
    """Returns the descriptor of a file. It starts with the name and ends with the syntax."""
    start = program.find(b"\n" + bytes([len(name)]) + name.encode())
    assert start >= 0, f"Envoy has no {name}"
    at, number = start, 0
    while number != SYNTAX:
        tag, at = _varint(program, at)
        number, kind = tag >> 3, tag & 7
        assert kind in (0, 2), f"{name} has no end"
        size, at = _varint(program, at)
        at += size if kind == 2 else 0
    return descriptor_pb2.FileDescriptorProto.FromString(program[start:at])


def _nested(messages: list[Message], enums: list[Enum]) -> Iterator[tuple[str, Message | Enum]]:
    yield from ((enum.name, enum) for enum in enums)
    for message in messages:
        yield message.name, message
        yield from _nested(list(message.nested_type), list(message.enum_type))


def _in(file: descriptor_pb2.FileDescriptorProto) -> dict[str, Message | Enum]:
    """Returns the messages and enums of a file by their names."""
    return dict(_nested(list(file.message_type), list(file.enum_type)))


def _shape(message: Message, field: Field) -> tuple[object, ...]:
    choice = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
    return field.number, field.type, field.label, field.type_name.rpartition(".")[2], choice


def test_fields_are_those_of_envoy() -> None:
    needs_envoy()
    theirs: dict[str, Message | Enum] = {}
    with (
        Path(example.envoy_program()).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as program,
    ):
        for name in FILES:
            theirs = _in(_file(program, name)) | theirs
    own = descriptor_pb2.FileDescriptorProto()
    ext_proc_pb2.DESCRIPTOR.CopyToProto(own)
    compared = 0
    for name, part in _in(own).items():
        real = theirs[name]
        if isinstance(part, Enum):
            assert isinstance(real, Enum)
            assert {v.name: v.number for v in part.value} == {v.name: v.number for v in real.value}, name
            compared += len(part.value)
            continue
        assert isinstance(real, Message)
        fields = {field.name: _shape(real, field) for field in real.field}
        for field in part.field:
            shape = _shape(part, field)
            if (name, field.name) == ("HttpStatus", "code"):
                assert fields["code"][1:4] == (Field.TYPE_ENUM, Field.LABEL_OPTIONAL, "StatusCode")
                shape = (field.number, *fields["code"][1:])  # an enum; the picker sends its number
            assert fields[field.name] == shape, f"{name}.{field.name}"
            compared += 1
    assert compared > 60
