"""Segments, identity, leases, and what a pool costs."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from helpers import WINDOW, random_ids, tiny_model
from transformers import DynamicCache

from polykv import SharedKVPool, attach, compress
from polykv.errors import (
    ContextReleasedError,
    IncompatiblePoolError,
    InvalidRequestError,
    PolyKVError,
    PromptTooLongError,
    UnknownCodecError,
    UnsupportedModelError,
)
from polykv.models.identity import ModelIdentity, identity_of, segment_identity
from polykv.pool import build as build_module
from polykv.pool import pool as pool_module
from polykv.pool.build import build_segment

DOCUMENT = random_ids(200, seed=1)


def private_cache_bytes(model: Any, ids: list[int]) -> int:
    """Bytes of transformers' own cache of these tokens, as float16."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([ids]), cache=cache)
    return sum((layer.keys.numel() + layer.values.numel()) * 2 for layer in cache.layers)


class TestBuild:
    @pytest.mark.parametrize("chunk", [1000, 200, 64, 7])
    def test_chunks_do_not_change_what_is_stored(self, family_model: Any, chunk: int, monkeypatch: Any) -> None:
        attach(family_model)
        from polykv.codecs import get_codec

        def build(tokens: int) -> Any:
            steps = build_segment(
                family_model, identity_of(family_model), DOCUMENT, get_codec("exact"), chunk_tokens=tokens
            )
            while True:
                try:
                    next(steps)
                except StopIteration as stop:
                    return stop.value

        whole, chunked = build(len(DOCUMENT)), build(chunk)
        assert whole.identity == chunked.identity
        for a, b in zip(whole.layers, chunked.layers, strict=True):
            assert torch.allclose(a.exact.keys, b.exact.keys, atol=1e-4)
            assert torch.allclose(a.exact.values, b.exact.values, atol=1e-4)

    def test_only_one_position_of_logits_is_computed(self, tiny_llama: Any) -> None:
        rows = []
        tiny_llama.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
        SharedKVPool.from_token_ids(tiny_llama, random_ids(1100))
        assert rows == [1, 1, 1]

    def test_progress_counts_tokens_and_layers(self, tiny_llama: Any) -> None:
        seen: list[tuple[str, int, int]] = []
        SharedKVPool.from_token_ids(tiny_llama, random_ids(600), progress=lambda *event: seen.append(event))
        assert seen == [
            ("prefill", 512, 600),
            ("prefill", 600, 600),
            ("encode", 1, 3),
            ("encode", 2, 3),
            ("encode", 3, 3),
        ]

    def test_the_dense_keys_and_values_go_layer_by_layer(self, tiny_llama: Any, monkeypatch: Any) -> None:
        builds = []

        class Recording(build_module.SegmentBuild):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                builds.append(self)

        monkeypatch.setattr(pool_module, "SegmentBuild", Recording)
        pool = SharedKVPool(tiny_llama)
        held = []
        for phase, done, _ in pool.build_steps(DOCUMENT):
            if phase == "encode":
                encoded = sum(layer.nbytes for layer in builds[0]._layers)
                held.append((done, builds[0].nbytes - encoded))
        layer = 2 * pool.segment.dense_bytes // 3  # float32
        assert held == [(1, 2 * layer), (2, layer), (3, 0)]

    def test_the_peak_is_the_dense_cache_and_the_first_encoded_layers(self, tiny_llama: Any) -> None:
        pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT)
        dense_float32 = 2 * pool.segment.dense_bytes
        assert dense_float32 < pool.segment.report.peak_bytes < dense_float32 + pool.segment.num_bytes

    def test_dropout_never_gets_into_a_pool(self) -> None:
        model = tiny_model("llama", attention_dropout=0.5)
        calm = SharedKVPool.from_token_ids(model, DOCUMENT, codec="exact").segment
        model.train()
        trained = SharedKVPool.from_token_ids(model, DOCUMENT, codec="exact").segment
        assert model.training
        for a, b in zip(calm.layers, trained.layers, strict=True):
            assert torch.equal(a.exact.keys, b.exact.keys)

    def test_a_text_shared_twice_is_built_once(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        assert pool.build(DOCUMENT) is pool.build(DOCUMENT)
        stats = pool.stats()
        assert (stats.builds, stats.hits, stats.misses, stats.num_segments) == (1, 1, 1, 1)

    def test_codecs_of_one_text_are_siblings(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        a, b = pool.build(DOCUMENT, "k8v3"), pool.build(DOCUMENT, "exact")
        assert a.identity == b.identity
        assert pool.stats().builds == 2

    def test_threads_that_share_one_text_build_it_once(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        start, found = threading.Barrier(8), []

        def work() -> None:
            start.wait()
            found.append(pool.build(DOCUMENT))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(segment) for segment in found}) == 1
        assert len(found) == 8
        assert pool.stats().builds == 1

    def test_a_failed_build_frees_those_who_wait(self, tiny_llama: Any, monkeypatch: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        steps = pool.build_steps(DOCUMENT)
        next(steps)
        waiting = threading.Thread(target=pool.build, args=(DOCUMENT,))
        waiting.start()
        steps.close()  # the first builder gives up
        waiting.join(timeout=60)
        assert not waiting.is_alive()
        assert pool.stats().builds == 1

    def test_a_build_that_its_progress_callback_broke_can_be_repeated(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)

        def broken(*event: object) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as kept:  # as a notebook keeps the traceback, and with it the frames
            pool.build(DOCUMENT, progress=broken)
        assert pool.build(DOCUMENT).num_tokens == len(DOCUMENT)
        assert kept.tb is not None

    def test_a_pool_built_in_inference_mode_is_read_outside_of_it(self, tiny_llama: Any) -> None:
        with torch.inference_mode():
            pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT)
        assert torch.isfinite(tiny_llama(torch.tensor([[5, 6]]), cache=pool.new_cache()).logits).all()

    def test_a_segment_is_a_leaf_of_no_graph(self, tiny_llama: Any) -> None:
        segment = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT).segment
        assert all(not t.requires_grad and not t.is_inference() for x in segment.layers for t in x.tensors().values())


class TestBytes:
    def test_num_bytes_is_the_sum_of_the_storages(self, family_model: Any) -> None:
        for codec in ("exact", "paper", "k8v3"):
            segment = SharedKVPool.from_token_ids(family_model, DOCUMENT, codec=codec).segment
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for layer in segment.layers
                for t in layer.tensors().values()
            }
            assert segment.num_bytes == sum(storages.values()) + 4 * len(DOCUMENT)

    def test_dense_bytes_are_what_transformers_would_hold(self, family_model: Any) -> None:
        segment = SharedKVPool.from_token_ids(family_model, DOCUMENT).segment
        assert segment.dense_bytes == private_cache_bytes(family_model, DOCUMENT)

    @pytest.mark.parametrize("codec", ["paper", "k8v3"])
    def test_a_pool_never_costs_more_than_one_private_cache(self, family_model: Any, codec: str) -> None:
        segment = SharedKVPool.from_token_ids(family_model, DOCUMENT, codec=codec).segment
        assert segment.num_bytes < private_cache_bytes(family_model, DOCUMENT)

    def test_sliding_layers_hold_only_what_their_window_reaches(self) -> None:
        model = tiny_model("gemma3", WINDOW)
        segment = SharedKVPool.from_token_ids(model, DOCUMENT).segment
        assert [layer.num_tokens for layer in segment.layers] == [WINDOW - 1, len(DOCUMENT), WINDOW - 1]
        assert [layer.start for layer in segment.layers] == [
            len(DOCUMENT) - WINDOW + 1,
            0,
            len(DOCUMENT) - WINDOW + 1,
        ]

    def test_ratios_at_the_stated_shape(self) -> None:
        model = tiny_model("llama", head_dim=64, max_position_embeddings=4096)
        for codec, least in (("paper", 2.70), ("k8v3", 2.75)):
            assert SharedKVPool.from_token_ids(model, random_ids(2048), codec=codec).stats().compression_ratio >= least

    def test_memory_summary_counts_agents(self, tiny_llama: Any) -> None:
        pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT)
        text = pool.memory_summary(n_agents=15)
        assert "15 x that" in text
        assert f"{pool.stats().compression_ratio:.2f}x" in text
        for wrong in (0, -1):
            with pytest.raises(InvalidRequestError, match=f"at least 1, got {wrong}"):
                pool.memory_summary(n_agents=wrong)


class TestIdentity:
    def test_every_field_changes_the_identity(self) -> None:
        base = ModelIdentity("name", "llama", "rev", "weights", "config", "rope", "adapter", "tokenizer")
        identities = {segment_identity(base, DOCUMENT)}
        for name in ("model_type", "revision", "weights", "config", "rope", "adapter", "tokenizer"):
            identities.add(segment_identity(ModelIdentity(**{**base.__dict__, name: "other"}), DOCUMENT))
        identities.add(segment_identity(base, DOCUMENT, salt="tenant"))
        identities.add(segment_identity(base, DOCUMENT[:-1]))
        identities.add(segment_identity(base, DOCUMENT[1:]))
        assert len(identities) == 11
        renamed = ModelIdentity(**{**base.__dict__, "name": "elsewhere"})
        assert segment_identity(renamed, DOCUMENT) in identities

    def test_fields_do_not_run_into_each_other(self) -> None:
        a = ModelIdentity("n", "llama", "ab", "c", "", "", "", "")
        b = ModelIdentity("n", "llama", "a", "bc", "", "", "", "")
        assert segment_identity(a, [1]) != segment_identity(b, [1])

    def test_identity_is_stable_across_processes_and_releases(self) -> None:
        identity = ModelIdentity("n", "llama", "", "w", "c", "r", "", "t")
        assert segment_identity(identity, range(3, 103)) == (
            "ee29ec274f719cb08cf7bbf63653e6bba5e12b19227b9928198465b0ea466e57"
        )

    @pytest.mark.parametrize("change", [{"sliding_window": 24}, {"rms_norm_eps": 0.1}, {"hidden_act": "gelu"}])
    def test_a_configuration_tells_models_of_equal_weights_apart(self, change: dict[str, Any], tokenizer: Any) -> None:
        pool = SharedKVPool.from_token_ids(tiny_model("mistral"), DOCUMENT)
        other = tiny_model("mistral", **{k: v for k, v in change.items() if k != "sliding_window"})
        if "sliding_window" in change:
            other = tiny_model("mistral", change["sliding_window"])
        with pytest.raises(IncompatiblePoolError, match="differs in its config"):
            pool.check_model(other)

    def test_where_a_model_lies_is_not_part_of_its_identity(self, tiny_llama: Any, tmp_path: Any) -> None:
        tiny_llama.save_pretrained(tmp_path)
        from transformers import AutoModelForCausalLM

        assert identity_of(AutoModelForCausalLM.from_pretrained(tmp_path)) == identity_of(tiny_llama)

    def test_weights_tell_models_apart(self) -> None:
        assert identity_of(tiny_model("llama")) == identity_of(tiny_model("llama"))
        assert identity_of(tiny_model("llama")).mismatch(identity_of(tiny_model("llama", seed=1))) == "weights"

    def test_tokenizers_tell_pools_apart(self, tiny_llama: Any, tokenizer: Any) -> None:
        from helpers import tiny_tokenizer

        pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT, tokenizer=tokenizer)
        other = tiny_tokenizer()
        other.add_tokens(["extra"])
        pool.check_model(tiny_llama, tokenizer)
        with pytest.raises(IncompatiblePoolError, match="differs in its tokenizer"):
            pool.check_model(tiny_llama, other)

    def test_a_revision_tells_pools_apart(self) -> None:
        a, b = tiny_model("llama"), tiny_model("llama")
        a.config._commit_hash, b.config._commit_hash = "aaa", "bbb"
        pool = SharedKVPool.from_token_ids(a, DOCUMENT)
        with pytest.raises(IncompatiblePoolError, match="differs in its revision"):
            pool.check_model(b)


class TestLeases:
    def test_release_is_idempotent(self, tiny_llama: Any) -> None:
        pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT)
        first, second = pool.lease(pool.segment), pool.lease(pool.segment)
        first.release()
        first.release()
        assert pool.num_leases == 1
        with second:
            pass
        assert pool.num_leases == 0

    def test_a_leased_segment_stays_until_its_reader_has_gone(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        segment = pool.build(DOCUMENT)
        lease = pool.lease(segment)
        pool.release(segment)
        assert pool.stats().num_segments == 1
        lease.release()
        assert pool.stats().num_segments == 0
        with pytest.raises(ContextReleasedError, match="share the text again"):
            pool.lease(segment)

    def test_each_handle_counts(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        segment = pool.build(DOCUMENT)
        pool.build(DOCUMENT)
        pool.release(segment)
        assert pool.stats().num_segments == 1
        pool.release(segment)
        pool.release(segment)
        assert pool.stats().num_segments == 0

    def test_the_sweeper_returns_leases_of_dead_owners(self, tiny_llama: Any) -> None:
        class Owner:
            pass

        pool = SharedKVPool.from_token_ids(tiny_llama, DOCUMENT)
        owner = Owner()
        pool.lease(pool.segment, owner)
        assert pool.sweep() == 0
        del owner
        gc.collect()
        assert pool.sweep() == 1
        assert pool.stats().num_leases == 0


class TestBadInput:
    def test_an_empty_context(self, tiny_llama: Any, tokenizer: Any) -> None:
        with pytest.raises(InvalidRequestError, match="no tokens"):
            SharedKVPool.from_token_ids(tiny_llama, [])
        for text in ("", "  \n\t "):
            with pytest.raises(InvalidRequestError, match="empty or white space"):
                compress(tiny_llama, tokenizer, text)

    def test_two_texts_are_not_taken_for_a_pair(self, tiny_llama: Any, tokenizer: Any) -> None:
        with pytest.raises(InvalidRequestError, match="one string, got list"):
            compress(tiny_llama, tokenizer, ["a", "b"])  # type: ignore[arg-type]

    def test_a_context_without_room_for_a_question(self, tiny_llama: Any) -> None:
        with pytest.raises(PromptTooLongError, match="2048 tokens, but the model has 2048 positions.*at least 1 token"):
            SharedKVPool.from_token_ids(tiny_llama, random_ids(2048))
        assert SharedKVPool.from_token_ids(tiny_llama, random_ids(2047)).segment.num_tokens == 2047

    @pytest.mark.parametrize("bad", [-1, 320, 10**6])
    def test_ids_outside_the_vocabulary(self, tiny_llama: Any, bad: int) -> None:
        with pytest.raises(InvalidRequestError, match=rf"\[0, 320\), got {bad}"):
            SharedKVPool.from_token_ids(tiny_llama, [5, bad])

    def test_an_unknown_codec(self, tiny_llama: Any) -> None:
        with pytest.raises(UnknownCodecError, match="unknown codec 'zip'; choose one of exact, k8v3, paper"):
            SharedKVPool.from_token_ids(tiny_llama, DOCUMENT, codec="zip")

    @pytest.mark.parametrize("codec", ["paper", "k8v3"])
    def test_a_head_dim_that_cannot_be_packed_is_refused_before_any_prefill(self, codec: str) -> None:
        model = tiny_model("llama", head_dim=24)
        model.model.register_forward_pre_hook(lambda *args: pytest.fail("the model was run"))
        with pytest.raises(UnsupportedModelError, match="head_dim 24.*codec='exact'"):
            SharedKVPool.from_token_ids(model, DOCUMENT, codec=codec)

    def test_head_dims_that_are_no_power_of_two_work(self) -> None:
        for head_dim in (48, 80, 96):
            model = tiny_model("llama", head_dim=head_dim)
            pool = SharedKVPool.from_token_ids(model, DOCUMENT)
            with torch.no_grad():
                assert torch.isfinite(model(torch.tensor([[5, 6]]), cache=pool.new_cache()).logits).all()

    def test_models_that_cannot_be_served_are_refused_at_once(self) -> None:
        with pytest.raises(UnsupportedModelError, match="sliding window of 1"):
            SharedKVPool(tiny_model("mistral", 1))
        with pytest.raises(UnsupportedModelError, match="'meta'"):
            SharedKVPool(tiny_model("llama").to("meta"))

    def test_a_model_that_gives_nan_stores_nothing(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        kept = pool.build(DOCUMENT)
        with torch.no_grad():
            tiny_llama.model.embed_tokens.weight[7] = torch.nan
        with pytest.raises(PolyKVError, match="layer 0 cannot be stored.*NaN"):
            pool.build([5, 6, 7, 8])
        assert pool.segments == (kept,)
        assert pool.stats().builds == 1

    def test_a_pool_with_several_segments_asks_which(self, tiny_llama: Any) -> None:
        pool = SharedKVPool(tiny_llama)
        a = pool.build(DOCUMENT)
        pool.build(DOCUMENT[:50])
        with pytest.raises(InvalidRequestError, match="2 segments"):
            pool.new_cache()
        assert pool.new_cache(a).get_seq_length() == len(DOCUMENT)
