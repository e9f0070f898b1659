module @gather attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 3 : i32} {
  func.func public @main(%arg0: tensor<1x8x128xui32>) -> (tensor<3x8x128xui32>) {
    %0 = "stablehlo.collective_permute"(%arg0) {source_target_pairs = dense<[[2, 1]]> : tensor<1x2xi64>} : (tensor<1x8x128xui32>) -> tensor<1x8x128xui32>
    %1 = stablehlo.concatenate %arg0, %0, dim = 0 : (tensor<1x8x128xui32>, tensor<1x8x128xui32>) -> tensor<2x8x128xui32>
    %2 = "stablehlo.collective_permute"(%1) {source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2x8x128xui32>) -> tensor<2x8x128xui32>
    %3 = stablehlo.concatenate %1, %2, dim = 0 : (tensor<2x8x128xui32>, tensor<2x8x128xui32>) -> tensor<4x8x128xui32>
    %4 = stablehlo.slice %3 [2:3, 0:8, 0:128] : (tensor<4x8x128xui32>) -> tensor<1x8x128xui32>
    %5 = stablehlo.slice %3 [0:2, 0:8, 0:128] : (tensor<4x8x128xui32>) -> tensor<2x8x128xui32>
    %6 = stablehlo.concatenate %4, %5, dim = 0 : (tensor<1x8x128xui32>, tensor<2x8x128xui32>) -> tensor<3x8x128xui32>
    return %6 : tensor<3x8x128xui32>
  }
}
