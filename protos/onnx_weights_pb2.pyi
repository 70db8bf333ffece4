from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Model(_message.Message):
    __slots__ = ("graph",)
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    graph: Graph
    def __init__(self, graph: _Optional[_Union[Graph, _Mapping]] = ...) -> None: ...

class Graph(_message.Message):
    __slots__ = ("node", "initializer", "input")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    node: _containers.RepeatedCompositeFieldContainer[Node]
    initializer: _containers.RepeatedCompositeFieldContainer[Tensor]
    input: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, node: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., initializer: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., input: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("input", "op_type", "attribute", "domain")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OP_TYPE_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    input: _containers.RepeatedScalarFieldContainer[str]
    op_type: str
    attribute: _containers.RepeatedCompositeFieldContainer[Attribute]
    domain: str
    def __init__(self, input: _Optional[_Iterable[str]] = ..., op_type: _Optional[str] = ..., attribute: _Optional[_Iterable[_Union[Attribute, _Mapping]]] = ..., domain: _Optional[str] = ...) -> None: ...

class Attribute(_message.Message):
    __slots__ = ("g",)
    G_FIELD_NUMBER: _ClassVar[int]
    g: Graph
    def __init__(self, g: _Optional[_Union[Graph, _Mapping]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dims", "data_type", "name", "external_data")
    DIMS_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_DATA_FIELD_NUMBER: _ClassVar[int]
    dims: _containers.RepeatedScalarFieldContainer[int]
    data_type: int
    name: str
    external_data: _containers.RepeatedCompositeFieldContainer[ExternalData]
    def __init__(self, dims: _Optional[_Iterable[int]] = ..., data_type: _Optional[int] = ..., name: _Optional[str] = ..., external_data: _Optional[_Iterable[_Union[ExternalData, _Mapping]]] = ...) -> None: ...

class ExternalData(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
