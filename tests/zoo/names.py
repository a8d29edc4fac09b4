"""The names of the architectures of the zoo."""

NAMES_OF_TRANSFORMERS = {
    "causal": (
        "afmoe apertus apertus1p5_text arcee aria_text bamba beam bert-generation biogpt bitnet bloom codegen "
        "cohere cohere2 cohere2_moe cpmant ctrl cwm deepseek_v2 deepseek_v3 deepseek_v4 diffllama doge dory "
        "emu3 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint "
        "fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified "
        "gemma4_unified_text glm glm4 glm4_moe got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese "
        "gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium "
        "hrm_text hy_v3 hy_v4 hyperclovax inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder "
        "jais2 jamba jetmoe kolibri1 laguna lara_mini lfm2 llama llama4 llama4_text longcat_flash mamba "
        "mamba2 mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral3 mistral mixtral mllama "
        "modernbert-decoder moshi mpt nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt "
        "persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_text qwen3_moe "
        "qwen3_next recurrent_gemma reformer rwkv sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm "
        "starcoder2 trocr vaultgemma xglm xlnet zamba zamba2 zaya"
    ),
    "masked": (
        "albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie "
        "esmc eurobert flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm luke megatron-bert "
        "mobilebert modernbert modernvbert mpnet mra nomic_bert nystromformer rembert roberta "
        "roberta-prelayernorm roc_bert roformer squeezebert tapas ultrabert ultravbert xlm xlm-roberta "
        "xlm-roberta-xl yoso"
    ),
    "seq2seq": (
        "audioflamingo3 bart bigbird_pegasus blenderbot blenderbot-small fsmt glmasr granite_speech "
        "granite_speech_plus longt5 m2m_100 marian mbart moss_transcribe_diarize mt5 musicflamingo mvp "
        "nllb-moe omniasr pegasus pegasus_x plbart prophetnet qwen2_audio qwen3_asr seamless_m4t "
        "seamless_m4t_v2 switch_transformers t5 t5gemma t5gemma2 umt5 voxtral"
    ),
    "base": (
        "aria aya_vision clip_text_model cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid "
        "dpr embedding_gemma2 embedding_gemma2_text exaone4_5 flava florence2 granite_docling "
        "granite_docling_text higgs_audio_v2 hyperclovax_vision_v2 idefics2 idefics3 imagegpt inkling2 "
        "inkling2_loop internvl kimi_k25 lfm2_vl lighton_ocr llava_next llava_next_video llava_onevision "
        "longformer markuplm minimax_m3_vl mistral3 molmo2_text muse_glimmer muse_glimmer_text "
        "muse_spark_text openai_privacy_filter ovis2 qianfan_ocr qwen2_vl_text qwen3_omni_moe_thinker "
        "qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text sam3_lite_text_text_model smolvlm splinter "
        "tipsv2_text_model unlimited_ocr video_llama_3 video_llava vipllava visual_bert"
    ),
    "image": (
        "beit convnext convnextv2 cvt data2vec-vision deit dinov2 dinov2_with_registers focalnet ijepa "
        "mobilenet_v1 perceiver poolformer pp_lcnet pvt pvt_v2 regnet resnet swiftformer swin swinv2 vit "
        "vit_msn"
    ),
    "backbone": (
        "dinov3_convnext dinov3_vit maskformer-swin pixio pp_lcnet_v3 pp_lcnet_v4 rf_detr_dinov2 "
        "rt_detr_resnet sapiens2 tipsv2_vision_model uvdoc_backbone vitdet"
    ),
    "detect": "conditional_detr dab-detr deformable_detr detr table-transformer yolos",
    "semseg": "mobilenet_v2 mobilevit segformer",
    "depth": "glpn",
    "video": "timesformer videomae",
    "audiocls": "audio-spectrogram-transformer wav2vec2-conformer",
    "ctc": "data2vec-audio hubert sew unispeech unispeech-sat wav2vec2 wav2vec2-bert wavlm",
    "speech": "moonshine speech_to_text whisper",
    "zsimage": "altclip chinese_clip clip clipseg metaclip_2 siglip tipsv2",
    "itt": "blip git kosmos-2.5 llava minicpm_ocr minicpmv4_6 minicpmv4_7 paligemma pp_formulanet qwen2_vl",
}
