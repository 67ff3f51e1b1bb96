"""The flags of floating-point errors, read between the items of a function.

Note [Flags]
    Flags are noted where a call of numpy's loops begins, and where the handling of errors changes. LLVM takes operations for free of side effects and
    would move them over that, so numbers in registers are set down in memory there, and taken up behind it.
"""

from __future__ import annotations

from aiograd.compiler.calls import Ref
from aiograd.compiler.native.elementwise import memory_type, vector
from aiograd.compiler.native.item_code import LANE_BYTES, ItemWriter
from aiograd.compiler.native.items import NativeCode, dtype_of

#: flags of the control register of x86-64
FLAGS = {"invalid": 1, "divide": 4, "over": 8, "under": 16}
#: places by which flags are moved that count under every handling of errors around the program
ALWAYS = 8


class FlagWriter(ItemWriter):
    """Writes items, and what notes their flags.

    Args:
        native: the function as data.
        is_dynamic: True for a text without sizes.
    """

    def __init__(self, native: NativeCode, *, is_dynamic: bool = False) -> None:
        super().__init__(native, is_dynamic=is_dynamic)
        self._has_stack_flags = False
        self._fence_bytes = 0

    def _stack_flags(self) -> str:
        """The flags of the other floating-point unit of x86-64, of the same bits, which are cleared: the C library raises some flags there."""
        code = "fnstsw %ax; testb $$63, %al; jz 1f; fnclex; 1:"
        return self._new(f'call i16 asm sideeffect "{code}", "={{ax}},~{{dirflag}},~{{fpsr}},~{{flags}}"()')

    def _clear_flags(self) -> None:
        self._head += ["  %control = alloca i32", "  %flags = alloca i32", "  store i32 0, ptr %flags"]
        self._line("call void @llvm.x86.sse.stmxcsr(ptr %control)")
        now = self._new("load i32, ptr %control")
        self._line(f"store i32 {self._new(f'and i32 {now}, {~0x3F}')}, ptr %control")
        self._line("call void @llvm.x86.sse.ldmxcsr(ptr %control)")
        if self._has_stack_flags:
            self._stack_flags()

    def _collect_flags(self, errors: tuple[tuple[str, str], ...]) -> None:
        """Note the flags that are set; flags that the calls ignore are cleared."""
        handled = dict(errors)
        around = sum([bit for name, bit in FLAGS.items() if name not in handled])
        always = sum([bit for name, bit in FLAGS.items() if handled.get(name, "ignore") != "ignore"])
        self._line("call void @llvm.x86.sse.stmxcsr(ptr %control)")
        control = now = self._new("load i32, ptr %control")
        if self._has_stack_flags:  # no more of that word than the flags: its other bits would change how the processor rounds
            flags = self._new(f"and i16 {self._stack_flags()}, {0x3F}")
            now = self._new(f"or i32 {now}, {self._new(f'zext i16 {flags} to i32')}")
        before = self._new("load i32, ptr %flags")
        found = self._new(f"and i32 {now}, {around}")
        if always:
            sure = self._new(f"shl i32 {self._new(f'and i32 {now}, {always}')}, {ALWAYS}")
            found = self._new(f"or i32 {found}, {sure}")
        self._line(f"store i32 {self._new(f'or i32 {before}, {found}')}, ptr %flags")
        if errors:
            self._line(f"store i32 {self._new(f'and i32 {control}, {~0x3F}')}, ptr %control")
            self._line("call void @llvm.x86.sse.ldmxcsr(ptr %control)")

    def _set_down(self, number: int) -> dict[Ref, str]:
        """Store the numbers in registers that this item or a later one reads, so that no operation is moved over what follows: their addresses."""
        found: dict[Ref, str] = {}
        for ref, value in self._registers.items():
            if dtype_of(ref).kind == "f" and self._last.get(self._native.locations[ref].root, -1) >= number:
                found[ref] = self._at("%fence", LANE_BYTES * len(found))
                self._line(f"store {vector(memory_type(dtype_of(ref)), self._lanes(ref))} {value}, ptr {found[ref]}, align 1")
        self._fence_bytes = max(self._fence_bytes, LANE_BYTES * len(found))
        if found:
            self._line('call void asm sideeffect "", "r,~{memory}"(ptr %fence)')
        return found

    def _take_up(self, kept: dict[Ref, str]) -> None:
        """Load what `_set_down` has stored."""
        if kept:
            self._line('call void asm sideeffect "", "r,~{memory}"(ptr %fence)')
        for ref, address in kept.items():
            self._registers[ref] = self._new(f"load {vector(memory_type(dtype_of(ref)), self._lanes(ref))}, ptr {address}, align 1")
