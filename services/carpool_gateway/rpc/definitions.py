"""Messages and services of gRPC, from a description in a few lines -> classes of protobuf.

    Pair: string key 1, int64* numbers 2           a message and its fields; * after a type: repeated
    Pair.Inner: float% by_name 1                   a message in a message; %: a map from names
    Choice: bool? flag 1, string? text 2           ?: of the oneof of this message, `choice`
    enum Color: RED 0, GREEN 1
    rpc Send: Pair -> Choice*                      a method; *: a stream

Each file has a pool of its own. So programs that import other descriptions of the same messages, such as
tritonclient, may do so in the same process.

Why: docs/decisions/0108.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    name: getattr(_FIELD, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


class Definitions:
    """The messages and the service of one file. `service`: its full name, such as `inference.Service`.

    `definitions["Pair"]` is the class of a message.
    """

    def __init__(self, file_name: str, service: str, text: str) -> None:
        package, _, name = service.rpartition(".")
        self.service = service
        self.file = descriptor_pb2.FileDescriptorProto(name=file_name, package=package, syntax="proto3")
        self._messages: dict[str, Any] = {}
        self._enums: set[str] = set()
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        described = [line for line in lines if not line.startswith("rpc ")]
        for line in described:
            self._declare(line.partition(":")[0].strip())
        for line in described:
            title, _, members = line.partition(":")
            self._define(title.strip(), [part.split() for part in members.split(",") if part.strip()])
        offered = self.file.service.add(name=name)
        for line in lines:
            if line.startswith("rpc "):
                self._add_method(offered, line.removeprefix("rpc "))
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(self.file.SerializeToString())
        self._classes = {
            title: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{title}"))
            for title in self._messages
        }

    def __getitem__(self, title: str) -> Any:
        return self._classes[title]

    def names(self) -> Iterator[str]:
        """The full names of all messages and enums, of the service and of its methods."""
        package = self.file.package
        yield from (f"{package}.{title}" for title in (*self._messages, *self._enums))
        yield self.service
        yield from (f"{self.service}.{method.name}" for method in self.file.service[0].method)

    def _declare(self, title: str) -> None:
        if title.startswith("enum "):
            self._enums.add(title.removeprefix("enum "))
            return
        outer, _, name = title.rpartition(".")
        messages = self._messages[outer].nested_type if outer else self.file.message_type
        self._messages[title] = messages.add(name=name)

    def _define(self, title: str, members: list[list[str]]) -> None:
        if title.startswith("enum "):
            outer, _, name = title.removeprefix("enum ").rpartition(".")
            enums = self._messages[outer].enum_type if outer else self.file.enum_type
            enum = enums.add(name=name)
            for value, number in members:
                enum.value.add(name=value, number=int(number))
            return
        message = self._messages[title]
        for kind, name, number in members:
            self._add_field(title, message, kind, name, int(number))

    def _add_field(self, title: str, message: Any, kind: str, name: str, number: int) -> None:
        field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
        mark, kind = (kind[-1], kind[:-1]) if kind[-1] in "*?%" else ("", kind)
        if mark == "*":
            field.label = _FIELD.LABEL_REPEATED
        elif mark == "?":
            if not message.oneof_decl:
                message.oneof_decl.add(name="choice")
            field.oneof_index = 0
        elif mark == "%":
            field.label = _FIELD.LABEL_REPEATED
            entry = message.nested_type.add(name="".join(map(str.capitalize, name.split("_"))) + "Entry")
            entry.options.map_entry = True
            self._add_field(title, entry, "string", "key", 1)
            self._add_field(title, entry, kind, "value", 2)
            field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{self.file.package}.{title}.{entry.name}"
            return
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
            return
        named = kind if f"{title}.{kind}" not in {*self._messages, *self._enums} else f"{title}.{kind}"
        field.type = _FIELD.TYPE_ENUM if named in self._enums else _FIELD.TYPE_MESSAGE
        field.type_name = f".{self.file.package}.{named}"

    def _add_method(self, service: Any, line: str) -> None:
        name, _, types = line.partition(":")
        taken, _, given = (part.strip() for part in types.partition("->"))
        service.method.add(
            name=name.strip(),
            input_type=f".{self.file.package}.{taken.rstrip('*')}",
            output_type=f".{self.file.package}.{given.rstrip('*')}",
            client_streaming=taken.endswith("*"),
            server_streaming=given.endswith("*"),
        )
