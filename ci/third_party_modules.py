"""Small LightningModules of other packages, with data generated in code.

If a package has a LightningModule, that one is used. Otherwise a module of the package is wrapped
as its documentation describes. The functions import the packages, so that packages that are not
installed can be skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset, TensorDataset

__all__ = ["MODULES", "ThirdParty"]

BATCH, BATCHES = 4, 8
SAMPLES = BATCH * BATCHES
CLASSES, VOCABULARY, LENGTH, PIXELS = 5, 64, 16, 32
Built = tuple[L.LightningModule, Any]
"""A module, and its training data: a loader or a LightningDataModule."""


@dataclass(frozen=True, kw_only=True)
class ThirdParty:
    """A module from a third-party package.

    Attributes:
        build: Function that creates the module and its data.
        package: Name on PyPI.
        imports: Python modules that it needs.
    """

    build: Callable[[], Built]
    package: str
    imports: tuple[str, ...]


class Wrapped(L.LightningModule):
    """A model with a loss function of (model, batch), trained with AdamW."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.model, batch)
        self.log("train_loss", loss, sync_dist=True, batch_size=BATCH)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _loader(*tensors: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=BATCH)


def _named(**tensors: Tensor) -> DataLoader:
    return DataLoader(StackDataset(**tensors), batch_size=BATCH)


def _images(channels: int = 3) -> Tensor:
    return torch.randn(SAMPLES, channels, PIXELS, PIXELS)


def _classes(*size: int, count: int = CLASSES) -> Tensor:
    return torch.randint(0, count, (SAMPLES, *size))


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (SAMPLES, length))


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


# ---- Lightning's demos ---------------------------------------------------------------------------


def _boring() -> Built:
    from lightning.pytorch.demos.boring_classes import BoringModel

    return BoringModel(), _loader_of_rows()


def _boring_manual() -> Built:
    from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel

    return ManualOptimBoringModel(), _loader_of_rows()


def _loader_of_rows() -> DataLoader:
    from lightning.pytorch.demos.boring_classes import RandomDataset

    return DataLoader(RandomDataset(32, SAMPLES), batch_size=BATCH)


def _transformer() -> Built:
    from lightning.pytorch.demos.transformer import LightningTransformer, Transformer

    module = LightningTransformer(vocab_size=VOCABULARY)
    # verify cannot reproduce the dropout of torch's attention
    module.model = Transformer(vocab_size=VOCABULARY, ninp=16, nhid=32, dropout=0.0)
    module.prepare_data = lambda: None  # type: ignore[method-assign]  # it would download WikiText2
    return module, _loader(_tokens(), _tokens())


def _lstm() -> Built:
    from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM

    module = LightningLSTM(vocab_size=VOCABULARY)
    module.model = SimpleLSTM(vocab_size=VOCABULARY, ninp=16, nhid=16, nlayers=2, dropout=0.0)
    module.prepare_data = lambda: None  # type: ignore[method-assign]
    return module, _loader(_tokens(), _tokens())


# ---- images --------------------------------------------------------------------------------------


def _torchvision_vit() -> Built:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=PIXELS,
        patch_size=8,
        num_layers=4,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        num_classes=CLASSES,
    )
    return Wrapped(model, _classify), _loader(_images(), _classes())


def _torchvision_shufflenet() -> Built:
    from torchvision.models import shufflenet_v2_x0_5

    return Wrapped(shufflenet_v2_x0_5(num_classes=CLASSES), _classify), _loader(
        _images(), _classes()
    )


def _timm(name: str, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        return Wrapped(model, _classify), _loader(_images(), _classes())

    return build


def _smp_unet() -> Built:
    import segmentation_models_pytorch as smp

    dice = smp.losses.DiceLoss(mode="binary")
    model = smp.Unet(
        "tu-test_resnet", encoder_weights=None, decoder_channels=(32, 16, 16, 8, 8), classes=1
    )
    masks = _classes(1, PIXELS, PIXELS, count=2).float()
    return Wrapped(model, lambda model, batch: dice(model(batch[0]), batch[1])), _loader(
        _images(), masks
    )


def _torchgeo_classification() -> Built:
    from torchgeo.trainers import ClassificationTask

    task = ClassificationTask(
        model="test_resnet", weights=None, in_channels=3, task="multiclass", num_classes=CLASSES
    )
    return task, _named(image=_images(), label=_classes())


def _torchgeo_segmentation() -> Built:
    from torchgeo.trainers import SemanticSegmentationTask

    task = SemanticSegmentationTask(
        model="unet", backbone="tu-test_resnet", weights=None, in_channels=3, num_classes=CLASSES
    )
    return task, _named(image=_images(), mask=_classes(PIXELS, PIXELS))


def _torchgeo_regression() -> Built:
    from torchgeo.trainers import RegressionTask

    task = RegressionTask(model="test_resnet", weights=None, in_channels=3, num_outputs=1)
    return task, _named(image=_images(), label=torch.randn(SAMPLES, 1))


def _torchgeo_byol() -> Built:
    from torchgeo.trainers import BYOLTask

    return BYOLTask(model="test_resnet", weights=None, in_channels=3), _named(image=_images())


def _torchgeo_moco() -> Built:
    from torchgeo.trainers import MoCoTask

    task = MoCoTask(
        model="test_resnet",
        weights=None,
        in_channels=3,
        version=2,
        size=PIXELS,
        layers=2,
        memory_bank_size=16,
    )
    return task, _named(image=_images())


def _monai_unet() -> Built:
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    dice = DiceLoss(sigmoid=True)
    model = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8, 16), strides=(2, 2))
    masks = _classes(1, PIXELS, PIXELS, count=2).float()
    module = Wrapped(model, lambda model, batch: dice(model(batch["image"]), batch["label"]))
    return module, _named(image=_images(1), label=masks)


def _monai_unetr() -> Built:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNETR

    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    model = UNETR(
        1, 2, PIXELS, feature_size=4, hidden_size=16, mlp_dim=32, num_heads=2, spatial_dims=2
    )
    masks = _classes(1, PIXELS, PIXELS, count=2)
    module = Wrapped(model, lambda model, batch: loss(model(batch["image"]), batch["label"]))
    return module, _named(image=_images(1), label=masks)


def _open_clip() -> Built:
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=16, head_width=8, image_size=PIXELS, patch_size=8)
    text = CLIPTextCfg(context_length=LENGTH, vocab_size=VOCABULARY, width=16, heads=2, layers=2)
    contrast = ClipLoss()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return contrast(*model(*batch))

    return Wrapped(CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text), loss), _loader(
        _images(), _tokens()
    )


def _lightly_simclr() -> Built:
    from lightly.loss import NTXentLoss
    from lightly.models import ResNetGenerator
    from lightly.models.modules import SimCLRProjectionHead

    backbone = nn.Sequential(
        *list(ResNetGenerator("resnet-9", 0.125).children())[:-1],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    model = nn.Sequential(backbone, SimCLRProjectionHead(64, 32, 16))
    contrast = NTXentLoss()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return contrast(model(batch[0]), model(batch[1]))

    return Wrapped(model, loss), _loader(_images(), _images())


# ---- text ----------------------------------------------------------------------------------------


def _litgpt() -> Built:
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        block_size=LENGTH,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        n_layer=4,
        n_head=2,
        n_embd=16,
        n_query_groups=2,
    )

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return chunked_cross_entropy(model(tokens), targets, chunk_size=0)

    return Wrapped(GPT(config), loss), _loader(_tokens(), _tokens())


def _x_transformers() -> Built:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True)
    network = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers)
    return Wrapped(AutoregressiveWrapper(network), lambda model, batch: model(batch[0])), _loader(
        _tokens(LENGTH + 1)
    )


def _peft_lora() -> Built:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(LlamaForCausalLM(config), adapter)
    tokens = _tokens()
    return Wrapped(model, lambda model, batch: model(**batch).loss), _named(
        input_ids=tokens, labels=tokens
    )


# ---- graphs and molecules ------------------------------------------------------------------------


class GraphClassifier(nn.Module):
    """Graph classification, from the examples of PyTorch Geometric."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GIN

        self.encoder = GIN(8, 16, num_layers=4)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, graphs: Any) -> Tensor:
        from torch_geometric.nn import global_add_pool

        x = self.encoder(graphs.x, graphs.edge_index)
        return self.head(global_add_pool(x, graphs.batch, size=graphs.num_graphs))


def _graphs() -> Built:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    def graph(nodes: int) -> Any:
        edges = torch.randint(0, nodes, (2, 3 * nodes))
        return Data(x=torch.randn(nodes, 8), edge_index=edges, y=torch.randint(0, CLASSES, (1,)))

    graphs = [graph(4 + index % 5) for index in range(SAMPLES)]
    module = Wrapped(GraphClassifier(), lambda model, batch: F.cross_entropy(model(batch), batch.y))
    return module, GraphLoader(graphs, batch_size=BATCH)


def _chemprop() -> Built:
    from chemprop import data, models
    from chemprop import nn as layers

    parts = ("C", "CC", "CO", "CN", "c1ccccc1", "C(Cl)", "C(=O)O", "CC(C)")
    smiles = [parts[index % 8] + parts[index // 8] for index in range(SAMPLES)]
    points = [data.MoleculeDatapoint.from_smi(one, [float(len(one))]) for one in smiles]
    module = models.MPNN(
        layers.BondMessagePassing(d_h=16),
        layers.MeanAggregation(),
        layers.RegressionFFN(input_dim=16),
    )
    return module, data.build_dataloader(
        data.MoleculeDataset(points), batch_size=BATCH, shuffle=False
    )


# ---- time series ---------------------------------------------------------------------------------


def _frame() -> Any:
    import numpy
    import pandas

    series, steps = 8, 24
    values = numpy.random.default_rng(0).normal(size=series * steps).astype("float32")
    names = numpy.repeat([f"s{index}" for index in range(series)], steps)
    index = numpy.tile(numpy.arange(steps), series)
    return pandas.DataFrame({"unique_id": names, "ds": index, "y": values})


def _pytorch_forecasting(name: str, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import pytorch_forecasting

        fixed = {} if name == "NBeats" else {"static_categoricals": ["unique_id"]}
        lags = {} if name == "NBeats" else {"time_varying_known_reals": ["ds"]}
        dataset = pytorch_forecasting.TimeSeriesDataSet(
            _frame(),
            time_idx="ds",
            target="y",
            group_ids=["unique_id"],
            max_encoder_length=8,
            min_encoder_length=8,
            max_prediction_length=4,
            time_varying_unknown_reals=["y"],
            target_normalizer=pytorch_forecasting.data.GroupNormalizer(groups=["unique_id"]),
            add_relative_time_idx=False,
            **fixed,
            **lags,
        )
        module = getattr(pytorch_forecasting, name).from_dataset(
            dataset, learning_rate=1e-3, **options
        )
        return module, dataset.to_dataloader(train=False, batch_size=BATCH, num_workers=0)

    return build


def _gluonts(name: str, module: str, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import importlib

        import numpy
        from gluonts.dataset.common import ListDataset
        from gluonts.itertools import Cached

        estimators = importlib.import_module(f"gluonts.torch.model.{module}")
        estimator = getattr(estimators, name)(
            prediction_length=4, context_length=8, batch_size=BATCH, **options
        )
        values = numpy.random.default_rng(0).normal(size=(8, 48)).astype("float32")
        dataset = ListDataset([{"start": "2020-01-01", "target": row} for row in values], freq="D")
        transformation = estimator.create_transformation()
        transformed = Cached(transformation.apply(dataset, is_train=True))
        lightning = estimator.create_lightning_module()
        batches = list(
            _first(
                estimator.create_training_data_loader(
                    transformed, lightning, shuffle_buffer_length=None
                ),
                BATCHES,
            )
        )
        stacked = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        return lightning, _named(**stacked)

    return build


def _first(loader: Any, count: int) -> Iterator[Any]:
    for index, batch in enumerate(loader):
        if index == count:
            return
        yield {key: value for key, value in batch.items() if isinstance(value, Tensor)}


def _neuralforecast(name: str, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import neuralforecast.models
        from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

        module = getattr(neuralforecast.models, name)(
            h=4, input_size=8, max_steps=10, batch_size=BATCH, windows_batch_size=16, **options
        )
        dataset, *_ = TimeSeriesDataset.from_df(_frame())
        return module, TimeSeriesDataModule(dataset=dataset, batch_size=BATCH, drop_last=False)

    return build


class _Given(Exception):
    """Module and data that darts passes to the Trainer."""


def _darts(name: str, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import darts.models
        import numpy
        from darts import TimeSeries

        class Catch(L.Trainer):
            def fit(self, model: Any, datamodule: Any, **_: Any) -> None:
                raise _Given(model, datamodule)

        values = numpy.random.default_rng(0).normal(size=48).astype("float32")
        model = getattr(darts.models, name)(
            input_chunk_length=8,
            output_chunk_length=4,
            batch_size=BATCH,
            random_state=0,
            force_reset=True,
            **options,
        )
        try:
            model.fit(
                TimeSeries.from_values(values),
                trainer=Catch(logger=False, enable_checkpointing=False),
            )
        except _Given as given:
            return given.args
        raise RuntimeError("darts did not train")

    return build


# ---- single cells --------------------------------------------------------------------------------


def _scvi() -> Built:
    import anndata
    import numpy
    import scvi

    counts = numpy.random.default_rng(0).poisson(2.0, size=(2 * SAMPLES, 20)).astype("float32")
    data = anndata.AnnData(counts)
    scvi.model.SCVI.setup_anndata(data)
    model = scvi.model.SCVI(data, n_hidden=8, n_latent=4)
    plan = scvi.train.TrainingPlan(model.module)
    splitter = scvi.dataloaders.DataSplitter(
        model.adata_manager, train_size=0.5, batch_size=BATCH, shuffle_set_split=False
    )
    return plan, splitter


def _module(build: Callable[[], Built], package: str, *imports: str) -> ThirdParty:
    return ThirdParty(build=build, package=package, imports=imports)


_DEMOS = "lightning.pytorch.demos"

MODULES: dict[str, ThirdParty] = {
    "BoringModel": _module(_boring, "lightning", _DEMOS),
    "ManualOptimBoringModel": _module(_boring_manual, "lightning", _DEMOS),
    "LightningTransformer": _module(_transformer, "lightning", _DEMOS),
    "LightningLSTM": _module(_lstm, "lightning", _DEMOS),
    "torchvision ViT": _module(_torchvision_vit, "torchvision", "torchvision"),
    "torchvision ShuffleNet": _module(_torchvision_shufflenet, "torchvision", "torchvision"),
    "timm ViT": _module(
        _timm(
            "vit_tiny_patch16_224",
            img_size=PIXELS,
            patch_size=8,
            depth=4,
            embed_dim=16,
            num_heads=2,
        ),
        "timm",
        "timm",
    ),
    "timm ConvNeXt": _module(
        _timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)), "timm", "timm"
    ),
    "timm ResNet": _module(_timm("test_resnet"), "timm", "timm"),
    "smp Unet": _module(_smp_unet, "segmentation-models-pytorch", "segmentation_models_pytorch"),
    "torchgeo ClassificationTask": _module(_torchgeo_classification, "torchgeo", "torchgeo"),
    "torchgeo SemanticSegmentationTask": _module(_torchgeo_segmentation, "torchgeo", "torchgeo"),
    "torchgeo RegressionTask": _module(_torchgeo_regression, "torchgeo", "torchgeo"),
    "torchgeo BYOLTask": _module(_torchgeo_byol, "torchgeo", "torchgeo"),
    "torchgeo MoCoTask": _module(_torchgeo_moco, "torchgeo", "torchgeo", "lightly"),
    "monai UNet": _module(_monai_unet, "monai", "monai"),
    "monai UNETR": _module(_monai_unetr, "monai", "monai", "einops"),
    "open_clip CLIP": _module(_open_clip, "open-clip-torch", "open_clip"),
    "lightly SimCLR": _module(_lightly_simclr, "lightly", "lightly"),
    "litgpt GPT": _module(_litgpt, "litgpt", "litgpt"),
    "x-transformers": _module(_x_transformers, "x-transformers", "x_transformers"),
    "peft LoRA": _module(_peft_lora, "peft", "peft", "transformers"),
    "PyG GIN": _module(_graphs, "torch-geometric", "torch_geometric"),
    "chemprop MPNN": _module(_chemprop, "chemprop", "chemprop"),
    "pytorch-forecasting TFT": _module(
        _pytorch_forecasting(
            "TemporalFusionTransformer", hidden_size=8, attention_head_size=2, dropout=0.0
        ),
        "pytorch-forecasting",
        "pytorch_forecasting",
    ),
    "pytorch-forecasting NBeats": _module(
        _pytorch_forecasting("NBeats", widths=[8, 8], num_blocks=[1, 1]),
        "pytorch-forecasting",
        "pytorch_forecasting",
    ),
    "pytorch-forecasting DeepAR": _module(
        _pytorch_forecasting("DeepAR", hidden_size=8, rnn_layers=2, dropout=0.0),
        "pytorch-forecasting",
        "pytorch_forecasting",
    ),
    "gluonts DeepAR": _module(
        _gluonts("DeepAREstimator", "deepar", freq="D", hidden_size=8, dropout_rate=0.0),
        "gluonts",
        "gluonts.torch",
    ),
    "gluonts PatchTST": _module(
        _gluonts(
            "PatchTSTEstimator",
            "patch_tst",
            patch_len=4,
            d_model=8,
            dim_feedforward=16,
            dropout=0.0,
        ),
        "gluonts",
        "gluonts.torch",
    ),
    "gluonts SimpleFeedForward": _module(
        _gluonts("SimpleFeedForwardEstimator", "simple_feedforward"), "gluonts", "gluonts.torch"
    ),
    "neuralforecast NHITS": _module(
        _neuralforecast("NHITS", mlp_units=3 * [[8, 8]]), "neuralforecast", "neuralforecast"
    ),
    "neuralforecast PatchTST": _module(
        _neuralforecast(
            "PatchTST",
            encoder_layers=2,
            n_heads=2,
            hidden_size=8,
            linear_hidden_size=16,
            patch_len=4,
        ),
        "neuralforecast",
        "neuralforecast",
    ),
    "darts NBEATSModel": _module(
        _darts("NBEATSModel", num_stacks=2, layer_widths=8), "darts", "darts"
    ),
    "darts TransformerModel": _module(
        _darts("TransformerModel", d_model=8, nhead=2, dim_feedforward=16, dropout=0.0),
        "darts",
        "darts",
    ),
    "darts TiDEModel": _module(_darts("TiDEModel", hidden_size=8, dropout=0.0), "darts", "darts"),
    "scvi SCVI": _module(_scvi, "scvi-tools", "scvi"),
}
