"""Models that are a row of blocks, run between their blocks by their own code."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
from harness import PATIENCE_S
from torch import nn

from tests.batching.staged.slicing.networks import DecoderStack, Encoder, UNet, join_and_take
from trims_shim.batching.staged.flow import NotJoinable, join
from trims_shim.batching.staged.slicing.block_slicing import slice_blocks
from trims_shim.batching.staged.slicing.examples import Example, are_identical
from trims_shim.errors import StagingError


def check(model: nn.Module, example: Any, stages: int, **options: Any) -> Any:
    """Alone bit for bit; joined and taken apart at the borders as far as kernels are exact."""
    staged = slice_blocks(model.eval(), example, stages, **options)
    assert len(staged) == stages
    for sizes in ((3, 2), (1, 1)):
        batches = [Example(example).with_rows(size) for size in sizes]
        results = join_and_take(staged, *batches)
        for batch, result in zip(batches, results, strict=True):
            expected = batch.call(model)
            assert are_identical(staged(*batch.batch()), expected)
            torch.testing.assert_close(_plain(result), _plain(expected))
    return staged


def _plain(output: Any) -> Any:
    return dict(output) if hasattr(output, "keys") else output


def ids_and_mask() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    return {"ids": torch.randint(0, 50, (3, 7)), "mask": mask}


class TestOwnModels:
    def test_an_encoder_with_masks(self) -> None:
        staged = check(Encoder(), ids_and_mask(), 3)
        short = Example({name: each[:2, :4] for name, each in ids_and_mask().items()})
        assert rows_differ(staged, Example(ids_and_mask()), short)

    def test_blocks_that_return_tuples(self) -> None:
        check(DecoderStack(), torch.rand(3, 5, 4), 4)

    def test_a_sequential_model(self) -> None:
        check(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(3, 3), 3)

    def test_a_sequential_body(self) -> None:
        check(UNet(), torch.rand(2, 3, 8, 8), 3, blocks="deep")

    @pytest.mark.parametrize("first", [0, 2])
    def test_autocast_for_some_blocks(self, first: int) -> None:
        """In any thread, and whether or not it is on where the stages are called."""

        class Halved(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for number, block in enumerate(self.blocks):
                    with torch.autocast("cpu", torch.bfloat16, enabled=number >= first):
                        x = block(x)
                return x.float()

        rows = torch.rand(3, 4)
        model = Halved()
        staged = check(model, rows, 4)
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.bfloat16):
            assert are_identical(staged(rows), model(rows))

    def test_blocks_whose_results_are_given_another_type(self) -> None:
        """Which their stand-ins have already."""

        class Double(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = block(x.float())
                return x

        model = Double().eval()
        for block in model.blocks:
            block.register_forward_hook(lambda block, args, output: output.double())
        with pytest.raises(StagingError, match=r"Double does not run block by block: .*dtype"):
            slice_blocks(model, torch.rand(2, 4), 2)

    def test_one_stage_and_the_most(self) -> None:
        check(Encoder(2), torch.randint(0, 50, (2, 5)), 1)
        check(Encoder(2), torch.randint(0, 50, (2, 5)), 4)
        with pytest.raises(ValueError, match="Encoder can be cut into 4 stages at most, not 5"):
            slice_blocks(Encoder(2).eval(), torch.randint(0, 50, (2, 5)), 5)

    def test_a_number_of_stages_that_is_none(self) -> None:
        """As by slice_model. Found: "4 stages at most, not 0", and errors of Python's."""
        for number in (0, -1):
            with pytest.raises(ValueError, match=f"n_stages is {number}; it has to be 1 or more"):
                slice_blocks(Encoder(2).eval(), torch.randint(0, 50, (2, 5)), number)
        with pytest.raises(TypeError, match=r"n_stages is 2\.5; it has to be a whole number"):
            slice_blocks(Encoder(2).eval(), torch.randint(0, 50, (2, 5)), cast(Any, 2.5))

    def test_torchs_encoder(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        check(model, torch.rand(2, 5, 8), 3)

    def test_blocks_that_are_called_in_another_way_for_other_data(self) -> None:
        model = Wrong("branch").eval()
        up, down = torch.ones(2, 4), -torch.ones(2, 4)
        staged = slice_blocks(model, up, 2)
        assert staged(down).tolist() == model(down).tolist() == (2 * down).tolist()
        assert staged(up).tolist() == model(up).tolist() == up.tolist()
        first = next(iter(staged))
        with pytest.raises(NotJoinable):
            join([first(up), first(down)])

    def test_a_model_that_is_called_in_another_way(self) -> None:
        class Talkative(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

            def forward(self, x: torch.Tensor, mask: Any = None, *, is_every: bool = False) -> Any:
                x = x if mask is None else x * mask
                seen = [x := block(x) for block in self.blocks]
                return seen if is_every else x

        model, x = Talkative().eval(), torch.rand(2, 4)
        staged = slice_blocks(model, {"x": x, "mask": None, "is_every": False}, 3)
        masked = {"x": x, "mask": x.round(), "is_every": False}
        assert are_identical(staged(masked), Example(masked).call(model))
        with pytest.raises(
            TypeError, match=r"1 tensors and \[None, False\], and are called with 1 "
        ):
            staged({"x": x, "mask": None, "is_every": True})
        with pytest.raises(TypeError, match=r"1 tensors and \[\], and are called with 2 and \[\]"):
            slice_blocks(model, x, 3)(x, x.round())

    def test_what_has_no_batch_axis_but_depends_on_the_data(self) -> None:
        """As masks that are one for all where nothing is padded."""
        model = Wrong("scale").eval()
        staged = slice_blocks(model, torch.ones(2, 4), 2)
        assert len(staged) == 2
        one, same, other = torch.ones(1, 4), torch.ones(3, 4), torch.full((1, 4), 3.0)
        first, last = staged
        assert last(join([first(one), first(same)])).tolist() == [[2.0] * 4] * 4
        with pytest.raises(NotJoinable):
            join([first(one), first(other)])
        with pytest.raises(NotJoinable):
            join([first(other), first(other)])
        assert last(first(other)).tolist() == model(other).tolist() == [[12.0] * 4]

    def test_blocks_that_write_to_a_view(self) -> None:
        """Such as patches of a picture: while gradients are on, torch refuses that."""

        class Adds(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x += super().forward(x)
                return x

        class Patches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Conv2d(3, 4, 2, stride=2)
                self.blocks = nn.Sequential(Adds(4, 4), Adds(4, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y: torch.Tensor = self.blocks(self.embed(x).flatten(2).transpose(1, 2))
                return y.mean(1)

        check(Patches(), torch.rand(3, 3, 4, 4), 3)

    def test_kinds_are_forgotten_and_never_confused(self) -> None:
        """Also where what is joined has other lengths each time."""
        first, _ = slice_blocks(Wrong("offset").eval(), torch.ones(2, 4), 2)
        before = first(torch.ones(1, 4))
        for length in range(5, 80):
            one, other = first(torch.ones(1, length)), first(torch.ones(2, length))
            assert join([one, other])[1].shape == (3, length)
        after = first(torch.full((1, 4), 2.0))
        with pytest.raises(NotJoinable):
            join([before, after])
        join([after, first(torch.full((1, 4), 2.0))])

    def test_hooks_of_blocks_run(self) -> None:
        model = Encoder().eval()
        staged = slice_blocks(model, torch.randint(0, 50, (2, 5)), 2)
        called: list[Any] = []
        model.layers[1].register_forward_hook(lambda *_: called.append(1))
        staged(torch.randint(0, 50, (2, 5)))
        assert called == [1]

    def test_the_model_is_not_touched(self) -> None:
        model = Encoder().eval()
        modules = list(model.modules())
        slice_blocks(model, torch.randint(0, 50, (2, 5)), 2)
        assert list(map(id, model.modules())) == list(map(id, modules))
        assert type(model.layers[0]).__call__ is nn.Module.__call__

    def test_compiled_blocks(self) -> None:
        compiled: list[Any] = []

        def compiler(block: Any) -> Any:
            compiled.append(block)
            return block

        model = Encoder().eval()
        staged = slice_blocks(model, torch.randint(0, 50, (2, 5)), 2, compiler=compiler)
        assert compiled == list(model.layers)
        assert staged(torch.randint(0, 50, (1, 4)))["pooled"].shape == (1, 16)

    def test_threads(self) -> None:
        """Preludes and postludes of several batches at the same time."""
        model = Encoder().eval()
        staged = slice_blocks(model, torch.randint(0, 50, (2, 5)), 3)
        batches = [torch.randint(0, 50, (1 + number, 5)) for number in range(4)]
        results: list[bool] = []

        def run(batch: torch.Tensor) -> None:
            for _ in range(5):
                results.append(are_identical(staged(batch), Example(batch).call(model)))

        threads = [threading.Thread(target=run, args=(batch,), daemon=True) for batch in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert results == [True] * 20


def rows_differ(staged: Any, one: Example, other: Example) -> bool:
    """Batches of other lengths run, and do not become one."""
    first = next(iter(staged))
    with pytest.raises(NotJoinable):
        join([first(*one.batch()), first(*other.batch())])
    return True


class Wrong(nn.Module):
    """Two blocks, and something that stages cannot do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(_Any() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.blocks
        if self.kind == "between":
            return three(two(one(x) + 1))
        if self.kind == "written between":
            y = one(x + 1)
            y[x < 0] = 0  # nothing, of an example of positive numbers
            return three(two(y))
        if self.kind == "batch second":
            return three(two(one(x.T))).T
        if self.kind == "batch and heads":
            return three(two(one(x, x.repeat(2, 1))))
        if self.kind == "skip":
            y = one(x)
            return three(two(y), y)
        if self.kind == "twice":
            return three(two(one(one(x))))
        if self.kind == "left out":
            return two(one(x))
        if self.kind == "cache":
            return three(two(one(x, object())))
        if self.kind == "size":
            return three(two(one(x, len(x))))
        if self.kind == "branch":
            return three(two(one(x, scale=1 if x.sum() > 0 else 2)))
        if self.kind == "scale":
            return three(two(one(x, scale=x[:1].mean(1, keepdim=True) + 1)))
        if self.kind == "offset":
            return three(two(one(x, scale=x[0] + 1)))
        if self.kind == "attention":
            return three(two(one(x, returns_more=True)[0]))
        return three(two(one(x))[:, :2].reshape(len(x), 2))


class _Any(nn.Module):
    def forward(
        self, x: torch.Tensor, other: Any = None, *, returns_more: bool = False, scale: Any = 1
    ) -> Any:
        return (x, x) if returns_more else x * scale


class TestWhatCannotBeCut:
    def test_with_an_example_that_the_model_refuses(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
        with pytest.raises(StagingError, match="Sequential does not run with the example"):
            slice_blocks(model, torch.ones(2, 3), 2)

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("between", "does something between its blocks 0 and 1"),
            ("written between", "does something between its blocks 0 and 1"),
            ("batch second", r"with a tensor \[4, 4\] where there are 4 rows"),
            ("batch and heads", r"with a tensor \[8, 4\] where there are 4 rows"),
            ("skip", "what blocks before the last one have returned"),
            ("twice", "calls its block 0 after 1 others"),
            ("left out", "has called 2 of its 3 blocks"),
            ("cache", "a object, which cannot go.*use_cache=False"),
            ("size", "in another way with 4 rows than with 5"),
            ("attention", "return more than a hidden state"),
            ("shape", "do not compute|does something between"),
        ],
    )
    def test_is_named(self, kind: str, message: str) -> None:
        with pytest.raises(StagingError, match=message):
            slice_blocks(Wrong(kind).eval(), torch.rand(4, 4), 2)

    @pytest.mark.parametrize("name", ["of the input", "of the first block's input", "of no rows"])
    def test_writing_to_what_has_another_name(self, name: str) -> None:
        """Joined batches have copies of each; all parts of a split have that without rows."""

        class Adds(nn.Linear):
            def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
                written = other if name == "of no rows" else x
                written += 0.01 * super().forward(written)
                return x + 0.01 * other

        class Writing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Adds(4, 4) for _ in range(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = x if name == "of the input" else x.relu()
                other = {"of the first block's input": y, "of no rows": x.new_ones(4)}.get(name, -x)
                for block in self.blocks:
                    y = block(y, other)
                return y + x

        model = Writing().eval()
        with pytest.raises(StagingError, match="a stage writes to a tensor"):
            slice_blocks(model, torch.rand(4, 4), 5)

    def test_a_model_that_does_not_run_without_its_blocks(self) -> None:
        class Shaped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([nn.Linear(3, 6), nn.Linear(3, 3)])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.blocks[1](self.blocks[0](x).view(len(x), 2, 3).sum(1))

        with pytest.raises(StagingError, match="stand-ins for its blocks 'blocks'"):
            slice_blocks(Shaped().eval(), torch.rand(2, 3), 2)

    def test_blocks_that_return_lists(self) -> None:
        class Listing(nn.Linear):
            def forward(self, x: Any) -> Any:
                return [super().forward(x if isinstance(x, torch.Tensor) else x[0]), None]

        model = nn.Sequential(Listing(3, 3), Listing(3, 3)).eval()
        with pytest.raises(StagingError, match="return more than a hidden state"):
            slice_blocks(model, torch.rand(2, 3), 2)

    def test_blocks_without_tensors(self) -> None:
        class Scale(nn.Module):
            def forward(self, number: int) -> int:
                return 2 * number

        class Scaled(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * super().forward(1)

        with pytest.raises(StagingError, match="calls its blocks with no tensor"):
            slice_blocks(Scaled(Scale(), Scale()).eval(), torch.rand(2, 5), 2)

    def test_blocks_whose_class_has_no_others(self) -> None:
        class Final(nn.Linear):
            def __init_subclass__(cls) -> None:
                raise TypeError("this class is final")

        model = nn.Sequential(Final(3, 3), Final(3, 3)).eval()
        with pytest.raises(StagingError, match="type Final cannot be stood in for"):
            slice_blocks(model, torch.rand(2, 3), 2)

    def test_no_blocks(self) -> None:
        with pytest.raises(StagingError, match=r"no nn\.ModuleList or nn\.Sequential"):
            slice_blocks(nn.Linear(2, 2).eval(), torch.rand(2, 2), 2)

    def test_train_mode(self) -> None:
        with pytest.raises(StagingError, match="train mode"):
            slice_blocks(Encoder(), torch.randint(0, 50, (2, 5)), 2)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_nested_tensors(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).eval()
        padding = torch.tensor([[False, False, False], [False, False, True]])
        example = {"src": torch.rand(2, 3, 8), "src_key_padding_mask": padding}
        with pytest.raises(StagingError, match="enable_nested_tensor=False"):
            slice_blocks(model, example, 2)


class TestTransformers:
    def test_an_encoder(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=50,
        )
        batch = ids_and_mask()
        example = {"input_ids": batch["ids"], "attention_mask": batch["mask"]}
        staged = check(transformers.BertModel(config), example, 3)
        # Without padding its mask is None: other calls, that are not joined with those of masks.
        full = {**example, "attention_mask": torch.ones_like(batch["mask"])}
        first = next(iter(staged))
        with pytest.raises(NotJoinable):
            join([first(example), first(full)])

    def test_a_decoder(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=50,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        example = {"input_ids": ids_and_mask()["ids"], "use_cache": False}
        check(model, example, 3)
        with pytest.raises(StagingError, match="use_cache=False"):
            slice_blocks(model, {**example, "use_cache": True}, 3)
