"""Small values for the fields of configurations of transformers, by the names of the fields."""

from __future__ import annotations

from typing import Any


def _each(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# What a field of this name is at most. Widths are 32, layers 2, heads 4, experts 4.
AT_MOST: dict[str, int] = (
    _each(64, "vocab_size vocab_size_per_layer_input text_vocab_size max_position_embeddings n_positions n_ctx")
    | _each(64, "max_source_positions max_target_positions max_seq_len max_sequence_length max_seq_length")
    | _each(64, "max_encoder_position_embeddings max_decoder_position_embeddings sliding_window attention_window_size")
    | _each(32, "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size d_embed word_embed_proj_dim")
    | _each(32, "projection_dim hidden_dim text_embed_dim decoder_hidden_size encoder_hidden_size entity_emb_size")
    | _each(32, "mm_hidden_size out_hidden_size attention_hidden_size lru_width mask_feature_size mlp_hidden_size")
    | _each(32, "fpn_hidden_size encoder_hidden_dim feat_dim feature_size vision_hidden_size text_hidden_size")
    | _each(32, "qformer_hidden_size embedding_dim cross_attention_hidden_size audio_embed_dim output_dim")
    | _each(32, "prompt_embed_dim d_latents image_size img_size")
    | _each(48, "intermediate_size ffn_dim d_ff n_inner mlp_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim")
    | _each(48, "dim_feedforward inner_dim ff_dim shared_expert_intermediate_size moe_intermediate_size d_inner")
    | _each(48, "encoder_intermediate_size decoder_intermediate_size expert_ffn_hidden_size shared_intermediate_size")
    | _each(48, "intermediate_size_mlp moe_shared_expert_intermediate_size ffn_intermediate_size mlp_intermediate_size")
    | _each(48, "dense_intermediate_size moe_shared_intermediate_size shared_expert_size n_shared_intermediate")
    | _each(2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth")
    | _each(2, "num_decoder_layers decoder_num_hidden_layers encoder_num_hidden_layers text_num_hidden_layers")
    | _each(2, "num_mem_blocks predictor_num_hidden_layers encoder_depth num_hidden_layers_per_block num_conv_layers")
    | _each(2, "num_prediction_layers decoder_num_layers num_text_encoder_layers")
    | _each(4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads")
    | _each(4, "encoder_num_attention_heads decoder_num_attention_heads num_q_heads decoder_num_heads")
    | _each(4, "num_encoder_attention_heads num_decoder_attention_heads predictor_num_attention_heads")
    | _each(4, "num_linear_attention_heads swa_num_attention_heads num_experts num_local_experts n_routed_experts")
    | _each(4, "moe_num_experts index_n_heads linear_num_key_heads linear_num_value_heads mamba_n_heads")
    | _each(4, "mamba_num_heads")
    | _each(2, "num_key_value_heads num_kv_heads num_global_key_value_heads encoder_num_key_value_heads")
    | _each(2, "decoder_num_key_value_heads multi_query_group_num swa_num_key_value_heads num_experts_per_tok")
    | _each(2, "num_experts_per_token moe_topk moe_top_k top_k_experts moe_k")
    | _each(8, "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim d_kv kv_channels global_head_dim kv_dim")
    | _each(8, "attention_head_dim qk_head_dim swa_head_dim swa_v_head_dim linear_key_head_dim index_head_dim")
    | _each(8, "linear_value_head_dim mamba_head_dim mamba_d_head hidden_size_per_layer_input rotary_dim")
    | _each(8, "state_size mamba_d_state ssm_state_size mamba_state_dim chunk_size mamba_chunk_size patch_size")
    | _each(8, "num_queries num_query_tokens attention_window")
    | _each(16, "q_lora_rank kv_lora_rank o_lora_rank time_step_rank mamba_dt_rank laurel_rank num_mel_bins")
    | _each(1, "n_group topk_group n_shared_experts moe_num_shared_experts num_shared_experts mamba_n_groups")
    | _each(1, "num_expert_group first_k_dense_replace")
)

# Lists: widths of stages keep their ratios, with this smallest width; depths are at most 2; others are replaced.
STAGE_WIDTHS = _each(True, "hidden_sizes neck_hidden_sizes encoder_in_channels embed_dims embed_dim") | _each(
    True, "stage_out_channels stage_in_channels stage_mid_channels"
)
SMALLEST_WIDTH = 16
STAGE_DEPTHS = frozenset({"depths", "stage_numb_of_layers", "layers_per_stage"})
ALL_WIDTHS = frozenset({"conv_dim", "tdnn_dim"})
LAYERS_OF_KIND = frozenset({"global_attn_indexes", "deepstack_visual_indexes", "fullatt_block_indexes"})

# Special tokens are below 6, what stands for other media from 50 on; text is drawn from what is between.
TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
    "sep_token_id": 3,
    "cls_token_id": 4,
    "mask_token_id": 5,
}
MEDIA_TOKENS = (
    _each(50, "image_token_id image_token_index")
    | _each(51, "video_token_id video_token_index")
    | _each(52, "audio_token_id audio_token_index")
    | _each(53, "vision_start_token_id")
    | _each(54, "vision_end_token_id vision_token_id image_break_token_id")
    | _each(55, "boi_token_id boi_token_index")
    | _each(56, "eoi_token_id eoi_token_index")
    | _each(57, "fake_image_token_id")
)
FIRST_WORD, LAST_WORD = 6, 49

# Chances, which are 0: the rest of a name, or all of it.
CHANCES = ("dropout", "pdrop", "layerdrop")
CHANCE_NAMES = _each(0.0, "drop_path_rate drop_rate hidden_drop jitter router_jitter_noise attn_drop drop_prob")
